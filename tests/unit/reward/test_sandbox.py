"""Unit tests of the sandbox with programs that try to escape, use too many resources or never exit."""

import os
import pickle
import select
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fixtures.sandbox import children, needs_walls
from twinkle.reward import InvalidRewardInput, ProgramNotStarted, SandboxLimits, SandboxUnavailable, run_program
from twinkle.reward.sandbox import watch

pytestmark = [pytest.mark.timeout(150), needs_walls]
GENEROUS_LIMITS = SandboxLimits(seconds=60, cpu_seconds=60)
"""Limits for programs that must exit by themselves, even on a slow machine."""

ATTEMPT = """
def attempt():
{body}
try:
    attempt()
except (OSError, RuntimeError, MemoryError, ValueError):
    print('refused')
else:
    print('done')
"""
"""A program that prints whether an attempt succeeded."""
IGNORE_SIGNALS = """
import signal
for number in range(1, 32):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True:
    pass
"""
"""A program that ignores signals and never exits."""
INSPECT_ENVIRONMENT = """
import os
print(sorted(os.environ), os.getcwd())
for number in range(3, 64):
    try:
        os.fstat(number)
    except OSError:
        continue
    print('open', number)
"""
"""A program that prints the names of its environment variables, its folder and its open files."""


def attempt(body: str) -> str:
    """Run lines of Python in the sandbox; return 'done', 'refused' or the error output."""
    lines = '\n'.join(f'    {line}' for line in body.splitlines())
    result = run_program(ATTEMPT.format(body=lines), limits=GENEROUS_LIMITS)
    assert result.outcome == 'exited', result
    return result.stdout.strip() or result.stderr


def test_a_program_reads_and_writes_text() -> None:
    """A program reads its standard input; its output, error output and exit code are returned."""
    source = 'import sys\nprint(input()[::-1])\nprint("note", file=sys.stderr)\nsys.exit(3)'
    result = run_program(source, 'näive\n', GENEROUS_LIMITS)
    assert (result.outcome, result.exit_code, result.stdout) == ('exited', 3, 'eviän\n')
    assert 'note' in result.stderr


def test_output_is_read_after_the_program_exited() -> None:
    """The output of a program that has already exited is complete."""
    source = 'import sys\nprint("out")\nprint("err", file=sys.stderr)\nsys.exit(3)'
    with subprocess.Popen(
        [sys.executable, '-c', source], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        process.wait()
        result = watch(process, GENEROUS_LIMITS)
    assert (result.outcome, result.exit_code) == ('exited', 3)
    assert (result.stdout, result.stderr) == ('out\n', 'err\n')


def test_the_standard_library_and_numpy_work() -> None:
    """Programs can import the standard library and numpy."""
    imports = 'import collections, datetime, heapq, itertools, json, math, random, re, numpy'
    assert run_program(f'{imports}\nprint(numpy.ones(3).sum())', limits=GENEROUS_LIMITS).stdout == '3.0\n'


@pytest.mark.parametrize(
    'body',
    [
        'import os\nos.fork()',
        'import subprocess\nsubprocess.run(["true"])',
        'import os\nos.execv("/bin/true", ["true"])',
        'import os\nos.posix_spawn("/bin/true", ["true"], {})',
        'import threading\nthreading.Thread(target=print).start()',
        'import multiprocessing\nmultiprocessing.Process(target=print).start()',
        'import socket\nsocket.socket()',
        'import os\nos.kill(os.getppid(), 9)',
        'import os\nos.killpg(0, 9)',
        'import fcntl, os\nfcntl.fcntl(1, fcntl.F_SETOWN, os.getppid())',
        'import fcntl\nfcntl.fcntl(1, 10, 9)',
        'import fcntl, struct\nfcntl.ioctl(1, 0x8901, struct.pack("i", 1))',
        'open("/etc/passwd").read()',
        'open("/proc/self/environ").read()',
        'import os\nos.listdir("/")',
        'import os\nos.open(".", os.O_TMPFILE | os.O_RDWR)',
        'import os\nos.memfd_create("note")',
        'import os\nos.open("program.py", os.O_RDONLY | os.O_TRUNC)',
        'import ctypes, os\nif ctypes.CDLL(None).open(b"program.py", os.O_RDONLY | os.O_TRUNC) < 0: raise OSError',
        'import ctypes\nif ctypes.CDLL(None).syscall(2, b"program.py", 0x200) < 0: raise OSError',
        'open("program.py", "a")',
        'open("program.py", "r+")',
        'open("/dev/null", "w")',
        'open("note", "w")',
        'open("/tmp/twinkle-note", "w")',
        'import os\nos.remove("program.py")',
        'import os\nos.chmod("program.py", 0o777)',
        'import os\nos.rename("program.py", "other.py")',
        'import os\nos.mkdir("folder")',
        'import os\nos.truncate("program.py", 0)',
        'import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))',
        'import ctypes\nif ctypes.CDLL(None).fork() < 0: raise OSError',
        'bytearray(1 << 40)',
    ],
)
def test_access_to_the_outside_is_refused(body: str) -> None:
    """A program cannot access processes, threads, the network, signals, files or limits."""
    assert attempt(body) == 'refused'


@pytest.mark.parametrize(
    'source',
    [
        'import os\nwhile True:\n    try: os.fork()\n    except OSError: pass',
        'while True: pass',
        'x = 9 ** 9 ** 9',
        'import os, time\nos.close(1)\nos.close(2)\ntime.sleep(60)',
        IGNORE_SIGNALS,
    ],
)
def test_programs_that_do_not_exit_are_stopped(source: str) -> None:
    """A program that exceeds its time limit is stopped, even if it ignores signals or closes its output."""
    before, began = children(), time.monotonic()
    result = run_program(source, limits=SandboxLimits(seconds=1.0))
    assert result.outcome == 'timed_out'
    assert result.exit_code < 0
    assert time.monotonic() - began < 30
    assert children() <= before


def test_cpu_time_is_limited() -> None:
    """The kernel terminates a program that exceeds its CPU time."""
    result = run_program('while True: pass', limits=SandboxLimits(seconds=60, cpu_seconds=1))
    assert result.outcome == 'exited'
    assert result.exit_code < 0


@pytest.mark.parametrize('stream', ['stdout', 'stderr'])
def test_huge_outputs_are_truncated(stream: str) -> None:
    """A program that writes too much is stopped, and its output is truncated at the limit."""
    source = f'import sys\nwhile True: sys.{stream}.write("x" * 65536)'
    result = run_program(source, limits=replace(GENEROUS_LIMITS, output_bytes=100_000))
    assert result.outcome == 'wrote_too_much'
    assert len(getattr(result, stream)) == 100_000


def test_memory_is_limited() -> None:
    """A program that exceeds its memory limit exits with an error."""
    source = 'kept = []\nwhile True: kept.append(bytearray(1 << 20))'
    result = run_program(source, limits=replace(GENEROUS_LIMITS, memory_bytes=1 << 28))
    assert result.outcome == 'exited'
    assert 'MemoryError' in result.stderr


def test_a_program_inherits_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A program inherits no environment variable, open file or folder, and its folder is deleted at the end."""
    monkeypatch.setenv('TWINKLE_API_KEY', 'secret')
    with (tmp_path / 'file').open('w') as file:
        os.set_inheritable(file.fileno(), True)
        result = run_program(INSPECT_ENVIRONMENT, limits=GENEROUS_LIMITS)
    assert 'TWINKLE_API_KEY' not in result.stdout
    assert 'open' not in result.stdout
    folder = result.stdout.splitlines()[0].rpartition(' ')[2]
    assert folder
    assert not Path(folder).exists()


def test_threads_may_run_programs_at_once() -> None:
    """Each thread gets the output of the program that it started."""
    results: dict[int, str] = {}

    def run(number: int) -> None:
        results[number] = run_program(f'print({number})', limits=GENEROUS_LIMITS).stdout

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: f'{number}\n' for number in range(4)}


def test_a_program_runs_the_same_twice() -> None:
    """String hashes, and therefore the order of sets, are the same in each run."""
    assert len({run_program('print(hash("a"))', limits=GENEROUS_LIMITS).stdout for _ in range(3)}) == 1


def test_an_interpreter_that_cannot_start_is_an_error() -> None:
    """An interpreter that cannot start raises ProgramNotStarted with its error output."""
    with pytest.raises(ProgramNotStarted) as caught:
        run_program('print(1)', limits=replace(GENEROUS_LIMITS, cpu_seconds=1 << 80))
    copy = pickle.loads(pickle.dumps(caught.value))
    assert copy.exit_code == caught.value.exit_code != 0
    assert copy.stderr == caught.value.stderr


def test_child_processes_of_a_program_are_stopped() -> None:
    """If the wall `processes` is missing, a program's child processes are stopped together with the program."""
    child = 'import time; print("begun", flush=True); time.sleep(600)'
    source = f'import subprocess, sys\nprint(subprocess.Popen([sys.executable, "-c", {child!r}]).pid, flush=True)'
    with subprocess.Popen(
        [sys.executable, '-c', source], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        process.wait()
        result = watch(process, SandboxLimits(seconds=1))
        assert process.stdout is not None
        # The pipe ends when the last process that has it open exits.
        assert process.stdout.read() in (b'', b'begun\n')
    assert any(word.isdecimal() for word in result.stdout.split())


def test_program_ends_with_the_process_that_runs_it() -> None:
    """A terminated process leaves no program running, although it cannot stop its programs itself."""
    code = 'from twinkle.reward import SandboxLimits, run_program\n'
    code += 'run_program("import time; time.sleep(600)", limits=SandboxLimits(seconds=600))'
    with subprocess.Popen([sys.executable, '-c', code]) as owner:
        while not (found := children(owner.pid)):
            assert owner.poll() is None
        program = os.pidfd_open(int(found.pop()))
        owner.terminate()
        # The descriptor is readable when the program has ended.
        assert select.select([program], [], [], 60)[0]
        os.close(program)


def test_invalid_limits_are_refused() -> None:
    """Invalid limits and unknown walls raise InvalidRewardInput."""
    for options in (
        *({'seconds': 0}, {'output_bytes': -1}, {'memory_bytes': float('nan')}, {'without_walls': ('moat',)}),
        *({'memory_bytes': 2.0**30}, {'cpu_seconds': 1.5}, {'output_bytes': 1e6}, {'cpu_seconds': True}),
    ):
        with pytest.raises(InvalidRewardInput):
            SandboxLimits(**options)


def test_the_error_about_missing_walls_names_them() -> None:
    """SandboxUnavailable names the missing walls and can be pickled."""
    error = SandboxUnavailable(('network', 'files'))
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.walls, str(copy)) == (('network', 'files'), str(error))
