"""Unit tests of the sandbox's system call filter, which an interpreter of filter programs executes."""

import errno
import itertools
import operator
import os
import runpy
from pathlib import Path

import twinkle.reward

WALLS = runpy.run_path(str(Path(twinkle.reward.__file__).parent / 'enclosed' / 'walls.py'))
STEPS = WALLS['_filter']()
X86_64, I386, AARCH64 = 0xC000003E, 0x40000003, 0xC00000B7
"""Architectures, as the kernel reports them to a filter."""
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
"""Results of the filter."""
TESTS = {0x15: operator.eq, 0x45: operator.and_}
"""Conditions of the filter's jump instructions: equality, and a common bit."""
OPEN, OPENAT, CREAT, OPENAT2 = 2, 257, 85, 437
"""Numbers of the system calls that open files on x86-64."""


def filter_result(call: int, second: int = 0, third: int = 0, machine: int = X86_64) -> int:
    """Run the filter for a system call with this second and third argument, and return the result."""
    steps, data = STEPS, {0: call, 4: machine, 24: second, 32: third}
    position, loaded = 0, 0
    while True:
        code, if_true, if_false, number = steps[position]
        if code == 0x06:
            return number
        position += 1
        if code == 0x20:
            loaded = data[number]
        else:
            position += if_true if TESTS[code](loaded, number) else if_false


def test_each_call_is_allowed_or_refused_by_the_lists() -> None:
    """Listed calls are allowed, conditional calls are allowed for listed commands, and other calls are refused."""
    arguments = (*range(16), 1030, 0x5401, 0x5412, 0x5413, 0x5450, 0x5451, 0x5452, 0x8901)
    calls = set(range(600)) - {OPEN, OPENAT}
    for call, argument in itertools.product(calls, arguments):
        is_allowed = call in WALLS['_ALLOWED_CALLS'] or argument in WALLS['_ALLOWED_COMMANDS'].get(call, ())
        assert filter_result(call, argument) == (ALLOW if is_allowed else REFUSE), call
    assert {filter_result(call | 0x40000000) for call in range(600)} == {REFUSE}


def test_files_are_opened_for_reading_only() -> None:
    """Opening a file to write, create or truncate it is refused; calls that hide their flags are refused too."""
    reading = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_APPEND
    assert {filter_result(OPEN, reading), filter_result(OPENAT, os.O_RDWR, reading)} == {ALLOW}
    for flag in (os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_RDWR, os.O_CREAT, os.O_TRUNC):
        assert {filter_result(OPEN, flag), filter_result(OPEN, reading | flag)} == {REFUSE}
        assert {filter_result(OPENAT, 0, flag), filter_result(OPENAT, 0, reading | flag)} == {REFUSE}
    assert {filter_result(CREAT), filter_result(OPENAT2)} == {REFUSE}


def test_calls_of_another_architecture_terminate_the_process() -> None:
    """A system call with another architecture's numbers terminates the process."""
    assert {filter_result(1, machine=machine) for machine in (I386, AARCH64)} == {KILL}
