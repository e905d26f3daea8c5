"""`twinkle logs`: the logs of the services of the local stack."""

import os
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from twinkle_client.cli.session import LocalStateDirOption, exit_on_interrupt, fail
from twinkle_client.stack import StackState, default_state_dir, service_of

_POLL_SECONDS = 0.3


def logs(
    services: Annotated[
        list[str] | None, typer.Argument(help='Services or processes, such as model or sampler-2. Default: all.')
    ] = None,
    lines: Annotated[int, typer.Option('--lines', '-n', min=0, help='Number of last lines of each process.')] = 20,
    is_followed: Annotated[bool, typer.Option('--follow', '-f', help='Also print new lines, until Ctrl-C.')] = False,
    state_dir: LocalStateDirOption = None,
) -> None:
    """Print the end of the logs of the local stack, which may be stopped.

    With several processes, each line begins with the name of its process.
    """
    folder = (state_dir or default_state_dir()).absolute()
    paths = _log_paths(folder)
    chosen = _chosen(paths, services or [])
    width = max(map(len, chosen)) if len(chosen) > 1 else 0
    readers = [_LogReader(paths[name], f'{name:<{width}} | ' if width else '') for name in chosen]
    for reader in readers:
        reader.print_last(lines)
    with exit_on_interrupt('the services continue'):
        while is_followed:
            for reader in readers:
                reader.print_new()
            time.sleep(_POLL_SECONDS)


def _log_paths(folder: Path) -> dict[str, Path]:
    """Return the log files of the running stack by process name; without a stack, all log files in the folder."""
    state = StackState.load(folder)
    if state is not None:
        return {service.name: Path(service.log_path) for service in state.services}
    found = sorted((folder / 'logs').glob('*.log'), key=lambda path: path.stem)
    paths = {path.stem: path for path in found}
    return paths or fail(f'no stack in {folder}; start one with `twinkle up`')


def _chosen(known: Iterable[str], wanted: Sequence[str]) -> list[str]:
    """Return the processes that `wanted` names directly or by service; all processes if `wanted` is empty."""
    for name in wanted:
        if not any(name in (process, service_of(process)) for process in known):
            fail(f'the stack has no service {name!r}; it has {", ".join(known)}')
    return [name for name in known if not wanted or name in wanted or service_of(name) in wanted]


class _LogReader:
    """Prints lines of a log file, which its process may empty when it becomes too large."""

    def __init__(self, path: Path, prefix: str) -> None:
        self._path = path
        self._prefix = prefix
        self._position = 0
        self._rest = b''

    def print_last(self, count: int) -> None:
        """Print the last lines, and continue after them."""
        try:
            with self._path.open('rb') as file:
                # Read one more line, because the last line may be incomplete.
                last = list(deque(file, maxlen=count + 1))
                self._position = file.tell()
        except FileNotFoundError:
            return
        if last and not last[-1].endswith(b'\n'):
            self._rest = last.pop()
        self._print(last[max(len(last) - count, 0) :])

    def print_new(self) -> None:
        """Print the complete lines that were added."""
        try:
            with self._path.open('rb') as file:
                if os.fstat(file.fileno()).st_size < self._position:
                    self._position, self._rest = 0, b''
                file.seek(self._position)
                data = self._rest + file.read()
                self._position = file.tell()
        except FileNotFoundError:
            return
        *complete, self._rest = data.split(b'\n')
        self._print(complete)

    def _print(self, lines: Sequence[bytes]) -> None:
        for line in lines:
            typer.echo(self._prefix + line.rstrip(b'\n').decode(errors='replace'))
