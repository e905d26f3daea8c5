"""A stack of the five services for a benchmark, started in a temporary folder and stopped at the end."""

import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from twinkle_client import TwinkleClient
from twinkle_client.stack import StackOptions, StackState, start_stack, stop_stack
from twinkle_client.stack.options import DEFAULT_MODEL

THREADS = 1
"""Number of torch threads in the model service, in the sampler and in the baseline."""


def default_device() -> str:
    """Return the device on which both programs of a comparison train: a GPU if there is one."""
    return 'cuda' if torch.cuda.is_available() else 'cpu'


@contextmanager
def running_stack(
    base_model: str = DEFAULT_MODEL,
    *,
    engine: str = 'torch',
    sampler_count: int = 1,
    dtype: str = 'float32',
    threads: int | None = THREADS,
    services: Mapping[str, Mapping[str, Any]] | None = None,
) -> Iterator[StackState]:
    """Yield a running stack, by default with the small real model and the torch engine.

    Args:
        base_model: Hub id, alias or folder of the base model.
        engine: Sampling engine, 'torch', 'vllm' or 'auto'.
        sampler_count: Number of samplers at the start.
        dtype: Data type of the base model; 'float32' by default, as in the programs with which the stack is compared.
        threads: Number of threads of the model service and of each sampling engine; None for the defaults of `up`.
        services: Configuration fields by service, added to the fields that set the threads.
    """
    count = {} if threads is None else {'thread_count': threads}
    defaults = {'model': count, 'sampler': {'torch': count, 'vllm': count}}
    with tempfile.TemporaryDirectory(prefix='twinkle-bench-') as folder:
        options = StackOptions(
            state_dir=Path(folder),
            base_model=base_model,
            engine=engine,
            sampler_count=sampler_count,
            dtype=dtype,
            services=_merged(defaults, services or {}),
        )
        state = start_stack(options, report=_ignore_report)
        try:
            yield state
        finally:
            stop_stack(state.state_dir, report=_ignore_report)


@contextmanager
def connected(state: StackState) -> Iterator[TwinkleClient]:
    """Yield a client that is connected to the stack."""
    with TwinkleClient(state.address, state.read_api_key()) as client:
        yield client


@contextmanager
def stopwatch() -> Iterator[list[float]]:
    """Yield a list, to which the duration of the block in seconds is added when the block ends."""
    seconds: list[float] = []
    begin = time.perf_counter()
    yield seconds
    seconds.append(time.perf_counter() - begin)


def _merged(defaults: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults, overridden field by field at every level by the values of `own`."""
    nested = {
        name: _merged(value, own[name])
        for name, value in defaults.items()
        if name in own and isinstance(value, Mapping)
    }
    return {**defaults, **own, **nested}


def _ignore_report(service: str, event: str) -> None:
    del service, event
