"""The arguments of vLLM's engine: arguments of the user, defaults of each platform, and fixed arguments."""

import atexit
import functools
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from vllm.config import StructuredOutputsConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext

from twinkle.nn import chosen_dtype
from twinkle.sampler.vllm.forms import BACKEND
from twinkle.sampler.vllm.penalties import penalty_processor
from twinkle.sampler.vllm.watchdog import record_owner
from twinkle.socket_folder import SocketFolder

EXTENSION = 'twinkle.sampler.vllm.worker.TwinkleWorker'
"""Worker extension that vLLM imports."""
CORE_SIDE = 'twinkle.sampler.vllm.core_side'
"""Module that every engine core imports, even if the core runs in a separate process from the workers."""
NEVER_EVICT = 1 << 20
"""Capacity of vLLM's adapter cache, which must not evict adapters, because they cannot be loaded again."""
_OWNED = ('model', 'enable_lora', 'worker_extension_cls', 'logprobs_mode', 'max_cpu_loras')
"""Arguments that users cannot set, because other values would give wrong results."""
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
    # Prefixes are shared in units of blocks. vLLM's default of 128 on a CPU would share very little.
    'block_size': 32,
}
_ENVIRONMENT: Mapping[str, str] = {
    'VLLM_NO_USAGE_STATS': '1',
    'VLLM_LOGGING_LEVEL': 'WARNING',
    # A fork of a multithreaded process may deadlock on a lock that another thread holds.
    'VLLM_WORKER_MULTIPROC_METHOD': 'spawn',
}
_SOCKETS = 'twinkle-vllm-'
"""Beginning of the name of a folder for vLLM's sockets."""
_CPU_ENVIRONMENT: Mapping[str, str] = {
    # The worker runs in the engine core's process, which avoids calls between two processes.
    'VLLM_ENABLE_V1_MULTIPROCESSING': '0',
    # 'auto' would reserve a core and pin threads; OMP_NUM_THREADS sets the number of threads instead.
    'VLLM_CPU_OMP_THREADS_BIND': 'nobind',
}


def is_cpu() -> bool:
    """Return whether vLLM was built for the CPU."""
    return current_platform.is_cpu()


def engine_args(folder: str, given: Mapping[str, Any]) -> AsyncEngineArgs:
    """Return vLLM's arguments for a model folder.

    Args:
        folder: model folder in the Hugging Face layout.
        given: the user's arguments, by vLLM's names.

    Raises:
        ValueError: an argument is unknown to vLLM, cannot be set by users, or has a value that is not supported.
    """
    owned = sorted(set(given) & set(_OWNED))
    if owned:
        raise ValueError(f'engine arguments {owned} are set by twinkle; leave them out')
    values = {**_DEFAULTS, **(_CPU_DEFAULTS if is_cpu() else {}), **given}
    # vLLM's fixed default seed would give every replica and every start the same samples for unseeded requests.
    values.setdefault('seed', random.SystemRandom().getrandbits(31))
    # vLLM's 'auto' would silently convert float32 to bfloat16.
    device = 'cpu' if is_cpu() else 'cuda'
    values['dtype'] = chosen_dtype(str(values.get('dtype', 'auto')), folder, device=device)
    # vLLM's backend 'auto' uses the first request's backend for all requests, and may therefore ignore constraints.
    forms = {'backend': BACKEND, **values.pop('structured_outputs_config', {})}
    if forms['backend'] != BACKEND:
        raise ValueError(f'structured_outputs_config: the backend must be {BACKEND}, got {forms["backend"]!r}')
    if forms.get('reasoning_parser_plugin') or values.get('reasoning_parser_plugin'):
        raise ValueError('reasoning_parser_plugin is set by twinkle; leave it out')
    forms['reasoning_parser_plugin'] = CORE_SIDE
    fixed = {
        'structured_outputs_config': StructuredOutputsConfig(**forms),
        'model': folder,
        'enable_lora': True,
        'worker_extension_cls': EXTENSION,
        'logprobs_mode': 'raw_logprobs',
        'max_cpu_loras': max(NEVER_EVICT, int(values['max_loras'])),
    }
    try:
        return AsyncEngineArgs(**values, **fixed)
    except TypeError as error:
        raise ValueError(f'vLLM has no such engine argument: {error}') from error


def engine_config(args: AsyncEngineArgs) -> VllmConfig:
    """Return vLLM's configuration, with the logits processor for penalties of continued sequences.

    Raises:
        ValueError: vLLM cannot run the model with these arguments; the message has one line.
    """
    try:
        config = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
    except ValidationError as error:
        problems = '; '.join(item['msg'].removeprefix('Value error, ') for item in error.errors())
        raise ValueError(f"vLLM cannot run this model, but 'engine: torch' may support it: {problems}") from error
    add_penalties(config)
    return config


def add_penalties(config: VllmConfig) -> None:
    """Add the logits processor of `penalties.py` that fits the model runner of a configuration.

    vLLM chooses the model runner from the complete configuration, so engine arguments cannot name the class.
    """
    given = config.model_config.logits_processors or []
    config.model_config.logits_processors = [*given, penalty_processor(is_v2=config.use_v2_model_runner)]


def prepare_environment(*, thread_count: int) -> None:
    """Set the environment variables that vLLM reads, for this process and its children.

    Existing values are kept, except the owner and, on a CPU, the number of threads.
    """
    record_owner()
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    _prepare_sockets()
    if is_cpu():
        for name, value in _CPU_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        os.environ['OMP_NUM_THREADS'] = str(thread_count)


@functools.cache
def _prepare_sockets() -> None:
    """Give vLLM a folder for its sockets, because it creates them in the temporary folder and never removes them."""
    given = os.environ.get('VLLM_RPC_BASE_PATH')
    # A parent process that also runs vLLM removes its own folder.
    if not given or Path(given).name.startswith(_SOCKETS):
        folder = SocketFolder(_SOCKETS)
        atexit.register(folder.remove)
        os.environ['VLLM_RPC_BASE_PATH'] = str(folder.path)
