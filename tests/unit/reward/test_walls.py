"""The filter of system calls, run step by step by an interpreter of its own."""

import errno
import itertools
import runpy
from pathlib import Path

import twinkle.reward

WALLS = runpy.run_path(str(Path(twinkle.reward.__file__).parent / 'enclosed' / 'walls.py'))
STEPS = WALLS['_filter']()
X86_64, I386, AARCH64 = 0xC000003E, 0x40000003, 0xC00000B7
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000


def answer_to(call: int, argument: int = 0, machine: int = X86_64) -> int:
    """Return what the filter answers to a system call with its second argument."""
    steps, facts = STEPS, {0: call, 4: machine, 24: argument}
    place, loaded = 0, 0
    while True:
        code, if_equal, if_not, number = steps[place]
        if code == 0x06:
            return number
        place += 1
        if code == 0x20:
            loaded = facts[number]
        else:
            place += if_equal if loaded == number else if_not


def test_each_call_is_answered_as_its_list_says() -> None:
    """Allowed, allowed for some commands, or refused; every jump lands where it should."""
    arguments = (*range(16), 1030, 0x5401, 0x5412, 0x5413, 0x5450, 0x5451, 0x5452, 0x8901)
    for call, argument in itertools.product(range(600), arguments):
        is_allowed = call in WALLS['_ALLOWED_CALLS'] or argument in WALLS['_ALLOWED_COMMANDS'].get(call, ())
        assert answer_to(call, argument) == (ALLOW if is_allowed else REFUSE), call
    assert {answer_to(call | 0x40000000) for call in range(600)} == {REFUSE}


def test_calls_by_other_numbers_end_the_process() -> None:
    """Another machine's numbers mean other calls."""
    assert {answer_to(1, machine=machine) for machine in (I386, AARCH64)} == {KILL}
