"""A sandbox that runs model-written Python programs in a restricted process."""

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
"""Names of the sandbox's walls: the resources that it restricts, in addition to its limits on time and output."""
_ENCLOSED = Path(__file__).parent / 'enclosed'
_ENVIRONMENT = {'LANG': 'C.UTF-8', 'OMP_NUM_THREADS': '1', 'OPENBLAS_NUM_THREADS': '1', 'PYTHONHASHSEED': '0'}
"""Environment of a program. Threads are forbidden, so libraries are configured not to start any."""


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """Limits of one run of a program.

    Raises:
        InvalidRewardInput: a limit is not above 0, a limit other than `seconds` is not an integer, or a wall is
            unknown.
    """

    seconds: float = 5.0
    """Wall-clock time in seconds, including the start of the interpreter."""
    cpu_seconds: int = 5
    """CPU time in seconds."""
    memory_bytes: int = 1 << 30
    """Address space in bytes. The interpreter needs about 30 MB, numpy 300 MB."""
    output_bytes: int = 1 << 20
    """Maximum size of standard output and of standard error, each. A program that writes more is stopped."""
    without_walls: tuple[str, ...] = ()
    """Walls from `WALLS` that may be missing, for machines that are already isolated."""

    def __post_init__(self) -> None:
        for name in ('seconds', 'cpu_seconds', 'memory_bytes', 'output_bytes'):
            if not getattr(self, name) > 0:
                raise InvalidRewardInput(name, f'must be above 0, got {getattr(self, name)}')
            if name != 'seconds' and type(getattr(self, name)) is not int:
                raise InvalidRewardInput(name, f'must be an integer, got {getattr(self, name)!r}')
        if unknown := set(self.without_walls) - set(WALLS):
            problem = f'contains unknown walls {sorted(unknown)}; known walls are {WALLS}'
            raise InvalidRewardInput('without_walls', problem)


@dataclass(frozen=True, kw_only=True)
class ProgramResult:
    """The result of one run of a program."""

    outcome: Literal['exited', 'timed_out', 'wrote_too_much']
    exit_code: int
    """Exit code. A negative value is the number of the signal that terminated the program."""
    stdout: str
    stderr: str


def run_program(source: str, stdin: str = '', limits: SandboxLimits | None = None) -> ProgramResult:
    """Run a Python program in a sandboxed process and return its output.

    The process runs in a separate session and a new temporary folder. It does not inherit the environment or open
    files, and its time, CPU time, memory and output are limited. With all walls, it cannot start processes or threads,
    open connections, modify files, or read files except in Python's folders and in its folder. All processes of
    its process group are stopped at the end. On Linux, the program ends when the thread that runs it ends, even if that
    thread is killed.

    The isolation is incomplete: programs share the kernel, the CPUs and the clock with other processes. They can see
    the installed packages, the host name, the load of the machine, and whether a guessed path exists. A kernel
    vulnerability breaks the sandbox. To run code from an attacker, rather than from a model in training, use a virtual
    machine.

    Raises:
        SandboxUnavailable: this machine does not support one of the `WALLS` that `limits` requires; nothing was run.
        ProgramNotStarted: the interpreter exited before the sandbox was set up, for example because memory ran out.
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
    paths = [str(_ENCLOSED / 'run_program.py'), str(os.getpid()), str(_ENCLOSED / 'walls.py'), folder]
    # The option -I would ignore PYTHONHASHSEED, and is not needed because the environment is replaced completely.
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
    """Read the output of a program until it exits or exceeds a limit, then stop its process group."""
    deadline = time.monotonic() + limits.seconds
    written = {'stdout': bytearray(), 'stderr': bytearray()}
    try:
        outcome = _read_until(process, written, deadline, limits.output_bytes)
    finally:
        # Without the wall `processes`, the program may have started children, which are in its process group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()
    texts = {name: bytes(data[: limits.output_bytes]).decode('utf-8', 'replace') for name, data in written.items()}
    return ProgramResult(outcome=outcome, exit_code=process.returncode, **texts)


def _read_until(
    process: subprocess.Popen[bytes], written: dict[str, bytearray], deadline: float, output_bytes: int
) -> Literal['exited', 'timed_out', 'wrote_too_much']:
    """Read both pipes to their end or to a limit, and return why the program stopped."""
    with selectors.DefaultSelector() as selector:
        for name, pipe in (('stdout', process.stdout), ('stderr', process.stderr)):
            assert pipe is not None  # noqa: S101  both are set by PIPE
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
        # Without a report, the process was stopped before it started the program.
        if result.outcome == 'exited':
            raise ProgramNotStarted(result.exit_code, result.stderr)
        return
    active = json.loads(report)
    missing = tuple(wall for wall in WALLS if wall not in active and wall not in limits.without_walls)
    if missing:
        raise SandboxUnavailable(missing)
