"""Parts shared by the commands: consoles, the options that select a server, tables, JSON, and error output."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn, cast

import typer
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table

from twinkle_client.client import TwinkleClient
from twinkle_client.endpoint import Endpoint, find_endpoint
from twinkle_client.errors import Error, RetryableError
from twinkle_client.stack import StackState, default_state_dir
from twinkle_client.tracing import tracing_to

_INTERRUPTED = 130
"""Exit status after SIGINT, by shell convention."""
# Ids such as `ses-1:train:0` contain names of emoji.
console = Console(emoji=False)
error_console = Console(stderr=True, emoji=False)

JsonOption = Annotated[bool, typer.Option('--json', help='Print JSON.')]
LocalStateDirOption = Annotated[
    Path | None,
    typer.Option(
        '--state-dir', help="State folder of the local stack. Default: TWINKLE_STATE_DIR, or the user's state folder."
    ),
]
"""Option of the commands that manage the local stack."""
StateDirOption = Annotated[
    Path | None,
    typer.Option(
        '--state-dir',
        help='State folder of the local stack. For a remote server, set TWINKLE_SERVER_URL and TWINKLE_API_KEY.',
    ),
]
"""Option of the commands that call a server."""


def print_table(table: Table) -> None:
    """Print a table in which no word is broken, because users copy ids into other commands.

    If the words need more space than the terminal has, the table is wider. Columns with a `ratio` are shortened.
    """
    for column in table.columns:
        if column.ratio is not None:
            continue
        cells = (column.header, *column.cells)
        words = ' '.join(
            console.render_str(cell).plain if isinstance(cell, str) else str(cell) for cell in cells
        ).split()
        column.min_width = max(map(len, words), default=0)
    needed = sum(column.min_width or 0 for column in table.columns) + 3 * len(table.columns) + 1
    if needed > console.width:
        table.width = needed
    console.print(table, crop=False)


def print_json(value: Any) -> None:
    """Print a value as JSON in one line."""
    typer.echo(json.dumps(value))


def message_json(message: Message) -> dict[str, Any]:
    """Return a message for JSON, with the names of the contract. All integers, even of 64 bits, are numbers."""
    values: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return _with_numbers(message.DESCRIPTOR, values)


def _with_numbers(descriptor: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a message's fields, with 64-bit integers as numbers instead of strings, except in maps."""
    fields = {name: descriptor.fields_by_name[name] for name in values}
    return {
        name: [_with_number(fields[name], item) for item in cast(list[Any], value)]
        if isinstance(value, list)
        else _with_number(fields[name], value)
        for name, value in values.items()
    }


def _with_number(field: Any, value: Any) -> Any:
    if field.cpp_type in {FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64}:
        return int(value)
    if isinstance(value, dict) and not field.message_type.GetOptions().map_entry:
        return _with_numbers(field.message_type, cast(dict[str, Any], value))
    return cast(Any, value)


def print_rows(table: Table, *, empty: str) -> None:
    """Print a table, or the message `empty` to stderr if it has no rows."""
    if table.row_count:
        print_table(table)
    else:
        error_console.print(empty, markup=False, highlight=False)


def fail(message: str) -> NoReturn:
    """Print an error message and exit with status 1."""
    error_console.print(f'twinkle: {message}', markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(1)


@contextmanager
def exit_on_interrupt(note: str) -> Iterator[None]:
    """Exit with status 130 and a one-line message on Ctrl-C.

    Args:
        note: Second half of the message: the state after the interrupt, or how to continue.
    """
    try:
        yield
    except KeyboardInterrupt:
        error_console.print(f'\ntwinkle: interrupted; {note}', markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(_INTERRUPTED) from None


def interrupt_on_termination() -> None:
    """Let SIGTERM and SIGHUP have the effect of Ctrl-C, for commands that must stop processes when they end."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise KeyboardInterrupt


@contextmanager
def open_client(state_dir: Path | None) -> Iterator[TwinkleClient]:
    """Provide a client of the stack in `state_dir`; print an error and exit if a call in the block fails.

    Without `state_dir`, the client uses the server that the environment names or, without one, the stack in the
    default folder.
    """
    folder = state_dir or default_state_dir()
    stack = StackState.load(folder) if state_dir is not None else None
    address = ''
    try:
        if state_dir is not None and (stack is None or not stack.is_reachable()):
            raise ValueError(f'no stack is running in {state_dir}; start one with `twinkle up`')
        endpoint = Endpoint.of_stack(stack) if stack is not None else find_endpoint('', '')
        address = endpoint.address
        with (
            tracing_to(folder / 'traces'),
            TwinkleClient(address, endpoint.api_key, ca=endpoint.ca, retry_timeout=timedelta(seconds=3)) as client,
        ):
            yield client
    except RetryableError as error:
        # An error without a reason comes from grpc and describes connections.
        fail(str(error) if error.reason else f'no Twinkle server responds at {address} [{error.code.name}]')
    except (Error, ValueError, OSError) as error:
        fail(str(error))
