"""The vLLM engine: vLLM's AsyncLLM with adapters loaded from memory and this library's stop rules.

`engine.py` contains the public engine. `worker.py` and `core_side.py` run in vLLM's processes, with the modules that
they import. Importing this package imports vLLM.
"""

from twinkle.sampler.vllm.adapter_slots import VllmAdapter
from twinkle.sampler.vllm.core import make_async_llm
from twinkle.sampler.vllm.engine import VllmEngine, VllmLoad
from twinkle.sampler.vllm.handover import AdapterSource
from twinkle.sampler.vllm.request import VllmRequest
from twinkle.sampler.vllm.sources import adapter_source, folder_tensors, tensor_names

__all__ = [
    'AdapterSource',
    'VllmAdapter',
    'VllmEngine',
    'VllmLoad',
    'VllmRequest',
    'adapter_source',
    'folder_tensors',
    'make_async_llm',
    'tensor_names',
]
