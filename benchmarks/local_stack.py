"""A stack of the five services for a benchmark: started in a folder of its own, stopped at the end."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from twinkle_client import TwinkleClient
from twinkle_client.stack import StackOptions, StackState, start_stack, stop_stack
from twinkle_client.stack.options import DEFAULT_MODEL

THREADS = 1
"""Of torch, in the model service, the sampler and the bare loop alike: two processes share two cores."""


@contextmanager
def running_stack(base_model: str = DEFAULT_MODEL) -> Iterator[StackState]:
    """Yield a running stack; by default on the small real model."""
    with tempfile.TemporaryDirectory(prefix='twinkle-bench-') as folder:
        options = StackOptions(
            state_dir=Path(folder),
            base_model=base_model,
            services={'model': {'thread_count': THREADS}, 'sampler': {'torch': {'thread_count': THREADS}}},
        )
        state = start_stack(options, report=_silent)
        try:
            yield state
        finally:
            stop_stack(state.state_dir, report=_silent)


@contextmanager
def connected(state: StackState) -> Iterator[TwinkleClient]:
    """Yield a client of the stack."""
    with TwinkleClient(state.address, state.read_api_key()) as client:
        yield client


@contextmanager
def stopwatch() -> Iterator[list[float]]:
    """Yield a list that holds the block's seconds once it has ended."""
    seconds: list[float] = []
    begin = time.perf_counter()
    yield seconds
    seconds.append(time.perf_counter() - begin)


def _silent(service: str, event: str) -> None:
    del service, event
