"""Arguments of vLLM: what its users give, and what each platform wants where they give nothing."""

import json
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.config import StructuredOutputsConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from twinkle.sampler.vllm.forms import BACKEND
from twinkle.sampler.vllm.penalties import CONTINUED_PENALTIES
from twinkle.sampler.vllm.watchdog import name_owner

EXTENSION = 'twinkle.sampler.vllm.worker.TwinkleWorker'
"""What our side of vLLM's workers is called."""
CORE_SIDE = 'twinkle.sampler.vllm.core_side'
"""What every engine core imports, also one that is not the process of its worker."""
NEVER_EVICT = 1 << 20
"""Adapters vLLM may keep beside those in its slots. It evicts above this, and an evicted adapter cannot be
read again: only we say which versions leave."""
_OWNED = ('model', 'enable_lora', 'worker_extension_cls', 'logprobs_mode', 'max_cpu_loras')
"""Arguments that are decided here; another value would make answers wrong."""
_DEFAULTS: Mapping[str, Any] = {
    'enable_prefix_caching': True,
    'max_num_seqs': 256,
    'max_loras': 8,
    'max_lora_rank': 32,
    'disable_log_stats': True,
    'enable_log_requests': False,
}
_CPU_DEFAULTS: Mapping[str, Any] = {
    'dtype': 'float32',
    'enforce_eager': True,
    'kv_cache_memory_bytes': 1 << 29,
    'max_num_seqs': 32,
    # Blocks are what prefixes are shared by; vLLM's own 128 on a CPU would share next to nothing.
    'block_size': 32,
}
_ENVIRONMENT: Mapping[str, str] = {
    'VLLM_NO_USAGE_STATS': '1',
    'VLLM_LOGGING_LEVEL': 'WARNING',
    # A fork of a process with threads may hang on a lock that one of them held.
    'VLLM_WORKER_MULTIPROC_METHOD': 'spawn',
}
_CPU_ENVIRONMENT: Mapping[str, str] = {
    # The worker lives in the engine core: one process and one hop less.
    'VLLM_ENABLE_V1_MULTIPROCESSING': '0',
    # OMP_NUM_THREADS decides; 'auto' would keep a core for itself and pin the others.
    'VLLM_CPU_OMP_THREADS_BIND': 'nobind',
}


def is_cpu() -> bool:
    """Return whether vLLM was built for the CPU."""
    return current_platform.is_cpu()


def engine_args(folder: str, given: Mapping[str, Any]) -> AsyncEngineArgs:
    """Return vLLM's arguments for a model folder.

    Args:
        folder: the model in the layout of the hub.
        given: arguments as vLLM names them.

    Raises:
        ValueError: an argument is unknown to vLLM, or one that is decided here.
    """
    owned = sorted(set(given) & set(_OWNED))
    if owned:
        raise ValueError(f'engine arguments {owned} are decided by twinkle; leave them out')
    values = {**_DEFAULTS, **(_CPU_DEFAULTS if is_cpu() else {}), **given}
    # Else every replica, and every start of one, would draw the same for requests without a seed.
    values.setdefault('seed', random.SystemRandom().getrandbits(31))
    values['dtype'] = explicit_dtype(folder, str(values.get('dtype', 'auto')))
    # vLLM's own 'auto' takes the first form's backend for all, and holds in silence less of a form than it promised.
    forms = {'backend': BACKEND, **values.pop('structured_outputs_config', {})}
    if forms['backend'] != BACKEND:
        raise ValueError(f'structured_outputs_config: only the backend {BACKEND} has bounds for costly forms')
    if forms.get('reasoning_parser_plugin') or values.get('reasoning_parser_plugin'):
        raise ValueError('reasoning_parser_plugin is decided by twinkle; leave it out')
    forms['reasoning_parser_plugin'] = CORE_SIDE
    fixed = {
        'structured_outputs_config': StructuredOutputsConfig(**forms),
        'model': folder,
        'enable_lora': True,
        'worker_extension_cls': EXTENSION,
        'logprobs_mode': 'raw_logprobs',
        'logits_processors': [*values.pop('logits_processors', []), CONTINUED_PENALTIES],
        'max_cpu_loras': max(NEVER_EVICT, int(values['max_loras'])),
    }
    try:
        return AsyncEngineArgs(**values, **fixed)
    except TypeError as error:
        raise ValueError(f'vLLM has no such engine argument: {error}') from error


def explicit_dtype(folder: str, dtype: str) -> str:
    """Return 'auto' as the dtype the model is stored in: vLLM's own 'auto' makes bfloat16 of float32 silently."""
    if dtype != 'auto':
        return dtype
    config = json.loads((Path(folder) / 'config.json').read_text())
    config = config.get('text_config', config)
    return str(config.get('dtype') or config.get('torch_dtype') or 'float32')


def prepare_environment(*, thread_count: int) -> None:
    """Set what vLLM reads from the environment, for this process and those it starts.

    Variables that are set already stay, but for the owner and, on a CPU, the number of threads.
    """
    name_owner()
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if is_cpu():
        for name, value in _CPU_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        os.environ['OMP_NUM_THREADS'] = str(thread_count)
