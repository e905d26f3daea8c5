"""Comparison of mathematical answers in a separate process with limits on time and memory."""

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
"""Memory limit of the process that compares answers."""
_MAX_CHARS = 2000
"""Maximum length of an answer. Longer answers are wrong, because parsing time is quadratic in the length."""


class MathJudge:
    """Compares the mathematical meaning of LaTeX and plain expressions with math-verify.

    math-verify runs in a separate process, because evaluating a model-written expression can take unlimited time or
    memory. The first comparison starts the process. At a limit, the process is terminated, the answer counts as wrong,
    and the next comparison starts a new process. Unpickled and forked judges start their own process. If the machine
    does not support all sandbox walls, the judge works with the available walls and logs a warning once.

    Args:
        seconds: time limit of one comparison.

    Concurrency: safe from any thread; comparisons run one at a time.

    Raises:
        MissingLibrary: math-verify is not installed.
        InvalidRewardInput: `seconds` is not above 0.
    """

    def __init__(self, seconds: float = 5.0) -> None:
        if not seconds > 0:
            raise InvalidRewardInput('seconds', f'must be above 0, got {seconds}')
        require_library('math_verify', 'rewards')
        self.seconds = seconds
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._terminate: Callable[[], object] = _do_nothing
        self._owner = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {'seconds': self.seconds}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.seconds = state['seconds']
        self._reset()

    def is_same(self, truth: str, answer: str) -> bool:
        """Return whether both answers are mathematically equal; False if an answer is too long or a limit is reached.

        Raises:
            MissingLibrary: math-verify is installed, but does not work.
        """
        if max(len(truth), len(answer)) > _MAX_CHARS:
            return False
        if os.getpid() != self._owner:
            self._reset()
        with self._lock:
            if self._process is None:
                self._process = self._start()
            response = _request(self._process, {'truth': truth, 'answer': answer})
            if response is None:
                self._stop()
        return response is True

    def close(self) -> None:
        """Stop the process if it is running. A later comparison starts a new process."""
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        self._terminate()
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
        # `finalize` calls `_terminate` at most once: explicitly, or when the judge is garbage collected.
        self._terminate = weakref.finalize(self, _terminate, process, self._owner)
        ready = _read(process)
        if not isinstance(ready, dict):
            self._terminate()
            raise MissingLibrary('a working version of math-verify', 'twinkle-grpc[rewards]')
        active = cast('dict[str, list[str]]', ready)['walls']
        if missing := tuple(wall for wall in WALLS if wall not in active):
            warn_of_missing_walls(missing)
        return process


@functools.cache
def warn_of_missing_walls(missing: tuple[str, ...]) -> None:
    """Log a warning about missing walls once per process."""
    _log.warning(
        'sandbox walls not supported missing=%s; comparing without them (Linux 5.13 or later on x86-64 supports all)',
        ','.join(missing),
    )


def require_library(library: str, extra: str) -> None:
    """Check that a library can be imported, without importing it.

    Raises:
        MissingLibrary: the library is not installed. The message names the extra that installs it.
    """
    if importlib.util.find_spec(library) is None:
        raise MissingLibrary(library.replace('_', '-'), f'twinkle-grpc[{extra}]')


def _request(process: subprocess.Popen[str], message: dict[str, str]) -> object:
    """Send a request and return the response, or None if the process exited."""
    assert process.stdin is not None  # noqa: S101  set by stdin=PIPE
    try:
        process.stdin.write(f'{json.dumps(message)}\n')
        process.stdin.flush()
    except BrokenPipeError:
        return None
    return _read(process)


def _read(process: subprocess.Popen[str]) -> object:
    """Return the next JSON value that the process writes, or None if it exited."""
    assert process.stdout is not None  # noqa: S101  set by stdout=PIPE
    line = process.stdout.readline()
    return json.loads(line) if line.endswith('\n') else None


def _do_nothing() -> None:
    """Serve as the stop function while no process runs."""


def _terminate(process: subprocess.Popen[str], owner: int) -> None:
    if os.getpid() != owner:
        # In a forked process, leave the judge process of the parent running.
        return
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        try:
            if pipe is not None:
                pipe.close()
        except BrokenPipeError:
            continue
