"""What the commands share: the terminal, the options that name a server, errors as one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from twinkle_client.client import TwinkleClient
from twinkle_client.endpoint import Endpoint, find_endpoint
from twinkle_client.errors import Error, RetryableError
from twinkle_client.stack import StackState, default_state_dir
from twinkle_client.tracing import tracing_to

_INTERRUPTED = 130
"""128 and the number of the signal, as shells have it."""
console = Console()
error_console = Console(stderr=True)

LocalStateDirOption = Annotated[
    Path | None,
    typer.Option('--state-dir', help='Folder of the local stack. Unset: TWINKLE_STATE_DIR, else the one of this user.'),
]
"""Of commands that are about this machine's own stack."""
StateDirOption = Annotated[
    Path | None,
    typer.Option(
        '--state-dir',
        help='Folder of the local stack. A server elsewhere is named by TWINKLE_SERVER_URL and TWINKLE_API_KEY.',
    ),
]
"""Of commands that call a server."""


def fail(message: str) -> NoReturn:
    """Print one line of error and end with status 1."""
    error_console.print(f'twinkle: {message}', markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(1)


@contextmanager
def told_on_interrupt(left: str) -> Iterator[None]:
    """On Ctrl-C end the command with status 130 and one line.

    Args:
        left: how things stand then: what goes on, or what the same command would do.
    """
    try:
        yield
    except KeyboardInterrupt:
        error_console.print(f'\ntwinkle: interrupted; {left}', markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(_INTERRUPTED) from None


@contextmanager
def open_client(state_dir: Path | None) -> Iterator[TwinkleClient]:
    """Connect to the stack of a folder, else as the environment says; failures end the command."""
    folder = state_dir or default_state_dir()
    stack = StackState.load(folder) if state_dir is not None else None
    address = ''
    try:
        if state_dir is not None and (stack is None or not stack.is_reachable()):
            raise ValueError(f'no stack runs in {state_dir}')
        endpoint = Endpoint.of_stack(stack) if stack is not None else find_endpoint('', '')
        address = endpoint.address
        with (
            tracing_to(folder / 'traces'),
            TwinkleClient(address, endpoint.api_key, ca=endpoint.ca, retry_timeout=timedelta(seconds=3)) as client,
        ):
            yield client
    except RetryableError as error:
        # Without a reason it is grpc that speaks, of its connections.
        fail(str(error) if error.reason else f'no Twinkle server answers at {address} [{error.code.name}]')
    except (Error, ValueError, OSError) as error:
        fail(str(error))
