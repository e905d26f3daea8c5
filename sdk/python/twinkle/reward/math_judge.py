"""Whether two mathematical answers are the same, asked of a process that may be ended at any moment."""

import functools
import importlib.util
import json
import logging
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from twinkle.component import MissingLibrary
from twinkle.reward.errors import InvalidRewardInput
from twinkle.reward.sandbox import WALLS

_log = logging.getLogger(__name__)
_ENCLOSED = Path(__file__).parent / 'enclosed'
_MEMORY_BYTES = 4 << 30
_LONGEST = 2000
"""Characters of an answer; longer ones are taken for wrong, as the parser takes time by the square of them."""


class MathJudge:
    """Compares answers with math-verify, which reads LaTeX and plain expressions and compares what they mean.

    It runs in a process of its own, begun at the first question, since a model can write expressions whose value takes
    forever or fills the memory: that process then ends itself, the answer is wrong, and the next question begins
    another. Pickles and forks of a judge begin their own. Where the machine cannot put up all of its walls, it answers
    behind those that stand, and a warning is logged once.

    Args:
        seconds: an answer may take.

    Concurrency: questions of several threads are answered one after the other.

    Raises:
        MissingLibrary: math-verify is not installed.
    """

    def __init__(self, seconds: float = 5.0) -> None:
        if not seconds > 0:
            raise InvalidRewardInput('seconds', f'must be above 0, got {seconds}')
        require_library('math_verify', 'rewards')
        self.seconds = seconds
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._end: Callable[[], object] = _nothing
        self._owner = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {'seconds': self.seconds}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.seconds = state['seconds']
        self._begin()

    def is_same(self, truth: str, answer: str) -> bool:
        """Return whether `answer` means what `truth` does; False where that cannot be told in time."""
        if max(len(truth), len(answer)) > _LONGEST:
            return False
        if os.getpid() != self._owner:
            self._begin()
        with self._lock:
            if self._process is None:
                self._process = self._start()
            verdict = _ask(self._process, {'truth': truth, 'answer': answer})
            if verdict is None:
                self._forget()
        return verdict is True

    def close(self) -> None:
        """End the process, if there is one; a later question begins another."""
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        self._end()
        self._process = None

    def _start(self) -> subprocess.Popen[str]:
        paths = [str(_ENCLOSED / 'judge_answers.py'), str(_ENCLOSED / 'walls.py')]
        process = subprocess.Popen(
            [sys.executable, '-I', '-B', *paths, str(_MEMORY_BYTES), str(self.seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={'LANG': 'C.UTF-8', 'OMP_NUM_THREADS': '1'},
            start_new_session=True,
            encoding='utf-8',
        )
        # It ends with the judge too, and once only.
        self._end = weakref.finalize(self, _end, process, self._owner)
        ready = _read(process)
        if not isinstance(ready, dict):
            self._end()
            raise MissingLibrary('a math-verify that loads', 'twinkle-grpc[rewards]')
        standing = cast('dict[str, list[str]]', ready)['walls']
        if missing := tuple(wall for wall in WALLS if wall not in standing):
            tell_of_missing_walls(missing)
        return process


@functools.cache
def tell_of_missing_walls(missing: tuple[str, ...]) -> None:
    """Log once in each process that the judge works without these walls."""
    _log.warning(
        'answers are compared without walls around %s, as this machine has none; Linux 5.13 on x86-64 has all of them',
        ', '.join(missing),
    )


def require_library(library: str, extra: str) -> None:
    """Check that a library can be imported, without importing it.

    Raises:
        MissingLibrary: it is not installed; names the extra that brings it.
    """
    if importlib.util.find_spec(library) is None:
        raise MissingLibrary(library.replace('_', '-'), f'twinkle-grpc[{extra}]')


def _ask(process: subprocess.Popen[str], question: dict[str, str]) -> object:
    """Return the process's answer; None where it ended instead."""
    assert process.stdin is not None  # noqa: S101  it was asked for
    try:
        process.stdin.write(f'{json.dumps(question)}\n')
        process.stdin.flush()
    except BrokenPipeError:
        return None
    return _read(process)


def _read(process: subprocess.Popen[str]) -> object:
    """Return what the process says next; None where it ended instead."""
    assert process.stdout is not None  # noqa: S101  it was asked for
    line = process.stdout.readline()
    return json.loads(line) if line.endswith('\n') else None


def _nothing() -> None:
    """Stand for the end of a process that was not begun."""


def _end(process: subprocess.Popen[str], owner: int) -> None:
    if os.getpid() != owner:
        # A fork of the program that started it lets go of its copy, and of nothing else.
        return
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        try:
            if pipe is not None:
                pipe.close()
        except BrokenPipeError:
            continue
