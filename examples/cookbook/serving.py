"""Connects recipes to running services, or starts services for a recipe."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from twinkle_client import TwinkleClient, init_twinkle_client
from twinkle_client.stack import StackOptions, StackState, default_state_dir, start_stack, stop_stack


@contextmanager
def connected(model: str) -> Iterator[TwinkleClient]:
    """Connect to services that train and sample `model`, and make the client the default of all handles.

    The services are the server at TWINKLE_SERVER_URL or the local stack started by `twinkle up`. Without either, five
    services with the torch engine are started now and stopped at the end.
    """
    running = StackState.load(default_state_dir())
    if os.environ.get('TWINKLE_SERVER_URL') or (running is not None and running.is_running()):
        with init_twinkle_client() as client:
            yield client
        return
    with tempfile.TemporaryDirectory(prefix='twinkle-recipe-') as folder:
        options = StackOptions(state_dir=Path(folder), base_model=model, engine='torch')
        stack = start_stack(options, report=lambda service, event: print(f'{service} is {event}', flush=True))
        try:
            with init_twinkle_client(stack.url, stack.read_api_key()) as client:
                yield client
        finally:
            stop_stack(options.state_dir, report=lambda *_: None)
