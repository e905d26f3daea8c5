"""Programs that a model wrote, run where they can do no harm."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from twinkle.reward.errors import InvalidRewardInput, ProgramNotStarted, SandboxUnavailable

WALLS = ('memory', 'processes', 'network', 'files')
"""What a program is kept within, beside its time and its output."""
_ENCLOSED = Path(__file__).parent / 'enclosed'
_ENVIRONMENT = {'LANG': 'C.UTF-8', 'OMP_NUM_THREADS': '1', 'OPENBLAS_NUM_THREADS': '1', 'PYTHONHASHSEED': '0'}
"""All that a program finds there: it may start no threads, so libraries must not try."""


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """What a program may use."""

    seconds: float = 5.0
    """Of wall clock, the interpreter's start included."""
    cpu_seconds: int = 5
    """Of a processor."""
    memory_bytes: int = 1 << 30
    """Of address space; the interpreter itself takes some 30 MB, numpy 300."""
    output_bytes: int = 1 << 20
    """Of its output and its errors, each; what writes more is ended."""
    without_walls: tuple[str, ...] = ()
    """Of `WALLS`, those that need not stand; for machines that are a sandbox themselves."""

    def __post_init__(self) -> None:
        """Check that each is of use."""
        for name in ('seconds', 'cpu_seconds', 'memory_bytes', 'output_bytes'):
            if not getattr(self, name) > 0:
                raise InvalidRewardInput(name, f'must be above 0, got {getattr(self, name)}')
            if name != 'seconds' and type(getattr(self, name)) is not int:
                raise InvalidRewardInput(name, f'must be a whole number, got {getattr(self, name)!r}')
        if unknown := set(self.without_walls) - set(WALLS):
            raise InvalidRewardInput('without_walls', f'has {sorted(unknown)}; walls are {WALLS}')


@dataclass(frozen=True, kw_only=True)
class ProgramResult:
    """How a program ended."""

    outcome: Literal['exited', 'timed_out', 'wrote_too_much']
    exit_code: int
    """0 where it came to its end; below 0 the signal that ended it."""
    stdout: str
    stderr: str


def run_program(source: str, stdin: str = '', limits: SandboxLimits | None = None) -> ProgramResult:
    """Run a Python program in a process of its own and return what it wrote.

    It has a session and an empty temporary folder of its own, none of this process's environment or open files, and
    bounds on time, processor, memory and output. Behind its walls it starts no process and no thread, opens no
    connection, changes no file, and reads none but Python's own. Its session is ended with it.

    What this does not keep apart: programs share the kernel, the processors and the clock with everybody; they see
    installed packages, the machine's name, how busy it is, and whether a path that they guess exists. A hole in the
    kernel is a hole in the walls. To run what somebody hostile wrote, rather than a model in training, use a virtual
    machine.

    Raises:
        SandboxUnavailable: this machine lacks a wall that `limits` does not do without; nothing was run.
        ProgramNotStarted: the interpreter ended before it put up its walls, for want of memory for example.
    """
    limits = limits or SandboxLimits()
    with tempfile.TemporaryDirectory(prefix='twinkle-program-') as folder:
        (Path(folder) / 'program.py').write_text(source, encoding='utf-8', errors='replace')
        (Path(folder) / 'stdin').write_text(stdin, encoding='utf-8', errors='replace')
        report_read, report_write = os.pipe()
        with os.fdopen(report_read, 'rb') as report, (Path(folder) / 'stdin').open('rb') as given:
            try:
                process = _start(folder, given.fileno(), report_write, limits)
            finally:
                os.close(report_write)
            with process:
                result = watch(process, limits)
            _check_walls(report.read(), result, limits)
    return result


def _start(folder: str, stdin: int, report: int, limits: SandboxLimits) -> subprocess.Popen[bytes]:
    bounds = [str(limits.memory_bytes), str(limits.cpu_seconds), ','.join(limits.without_walls), str(report)]
    paths = [str(_ENCLOSED / 'run_program.py'), str(_ENCLOSED / 'walls.py'), folder]
    # Not -I, which would not look at PYTHONHASHSEED; all other variables are ours too.
    return subprocess.Popen(
        [sys.executable, '-s', '-P', '-B', *paths, *bounds],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        env=_ENVIRONMENT,
        pass_fds=(report,),
        start_new_session=True,
    )


def watch(process: subprocess.Popen[bytes], limits: SandboxLimits) -> ProgramResult:
    """Read what a program writes until it ends or is ended; it may have ended before."""
    deadline = time.monotonic() + limits.seconds
    written = {'stdout': bytearray(), 'stderr': bytearray()}
    try:
        outcome = _read_until(process, written, deadline, limits.output_bytes)
    finally:
        # Without the wall around processes it may have started some; they are of its group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()
    texts = {name: bytes(data[: limits.output_bytes]).decode('utf-8', 'replace') for name, data in written.items()}
    return ProgramResult(outcome=outcome, exit_code=process.returncode, **texts)


def _read_until(
    process: subprocess.Popen[bytes], written: dict[str, bytearray], deadline: float, output_bytes: int
) -> Literal['exited', 'timed_out', 'wrote_too_much']:
    """Read both pipes to their end, or to a bound."""
    with selectors.DefaultSelector() as selector:
        for name, pipe in (('stdout', process.stdout), ('stderr', process.stderr)):
            assert pipe is not None  # noqa: S101  both were asked for
            selector.register(pipe, selectors.EVENT_READ, name)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                return 'timed_out'
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                written[key.data] += data
                if not data:
                    selector.unregister(key.fileobj)
                if len(written[key.data]) > output_bytes:
                    return 'wrote_too_much'
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return 'timed_out'
    return 'exited'


def _check_walls(report: bytes, result: ProgramResult, limits: SandboxLimits) -> None:
    if not report:
        # What was ended before it could report had no time to start the program either.
        if result.outcome == 'exited':
            raise ProgramNotStarted(result.exit_code, result.stderr)
        return
    standing = json.loads(report)
    missing = tuple(wall for wall in WALLS if wall not in standing and wall not in limits.without_walls)
    if missing:
        raise SandboxUnavailable(missing)
