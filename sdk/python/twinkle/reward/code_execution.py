"""The reward for model-written programs: the fraction of tests that they pass."""

import re
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from twinkle.blocking import results_of
from twinkle.reward.base import AnswerReward, read_truths
from twinkle.reward.errors import InvalidRewardInput
from twinkle.reward.reading import after_thinking, completion_of
from twinkle.reward.sandbox import ProgramResult, SandboxLimits, run_program

_FENCE = re.compile(r' {0,3}(`{3,})[ \t]*([^`]*)$')
"""A line that opens or closes a fenced block, with the info string (CommonMark 0.31, section 4.5)."""
_PYTHON = ('python', 'py', 'python3')


class CodeExecutionReward(AnswerReward):
    """The fraction of tests that the last fenced program of a completion passes; 0 if there is no program.

    The ground truth contains the tests. A test is a pair `{'input': ..., 'output': ...}` of standard input and expected
    standard output; outputs are compared without trailing whitespace. A test may also be Python code such as
    `assert f(2) == 4`, which runs after the program in the same process.

    Each test runs in its own sandboxed process; see `run_program` for its guarantees. A program could find and
    circumvent Python tests, because they share its process. The expected output of a pair is hidden from the program.

    Args:
        ground_truth_key: key of the tests in `user_data`: one test or a list.
        limits: limits of each run.
        num_workers: number of programs that run at the same time.

    Raises:
        InvalidRewardInput: `num_workers` is below 1.
    """

    def __init__(
        self, ground_truth_key: str = 'tests', *, limits: SandboxLimits | None = None, num_workers: int = 1
    ) -> None:
        super().__init__(ground_truth_key)
        if num_workers < 1:
            raise InvalidRewardInput('num_workers', f'must be at least 1, got {num_workers}')
        self.limits, self.num_workers = limits or SandboxLimits(), num_workers

    def __call__(
        self,
        trajectories: Sequence[Mapping[str, Any]],
        ground_truths: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> list[float]:
        """Return the fraction of tests that each program passes.

        Raises:
            InvalidRewardInput: a trajectory has no messages, or tests are missing or malformed.
            SandboxUnavailable: this machine does not support a sandbox wall that `limits` requires.
            ProgramNotStarted: the interpreter cannot start within the limits.
        """
        completions = [completion_of(trajectory, index) for index, trajectory in enumerate(trajectories)]
        tests = [_read_tests(truth) for truth in read_truths(self.ground_truth_key, trajectories, ground_truths)]
        with ThreadPoolExecutor(self.num_workers) as pool:
            pairs = zip(completions, tests, strict=True)
            return results_of([pool.submit(self.score, completion, test) for completion, test in pairs])

    def score(self, completion: str, ground_truth: Any) -> float:
        """Return the fraction of tests that one program passes."""
        source, tests = program_of(completion), _read_tests(ground_truth)
        if source is None:
            return 0.0
        return sum(self._passes(source, test) for test in tests) / len(tests)

    def _passes(self, source: str, test: Any) -> bool:
        if isinstance(test, str):
            # A program that exits early with code 0 does not print this marker.
            marker = secrets.token_hex(16)
            result = run_program(f'{source}\n{test}\nprint({marker!r})\n', limits=self.limits)
            return _has_succeeded(result) and result.stdout.endswith(f'{marker}\n')
        result = run_program(source, str(test['input']), self.limits)
        return _has_succeeded(result) and _lines(result.stdout) == _lines(str(test['output']))


def program_of(completion: str) -> str | None:
    """Return the last closed fenced block after the thinking: a Python block, or else a block without a language.

    Blocks in other languages are ignored. Return None if there is no such block.
    """
    blocks = _fenced_blocks(after_thinking(completion))
    programs = [text for language, text in blocks if language in _PYTHON]
    unlabelled = [text for language, text in blocks if not language]
    return next(iter([*programs[-1:], *unlabelled[-1:]]), None)


def _fenced_blocks(text: str) -> list[tuple[str, str]]:
    """Return the language and the text of each closed fenced block."""
    blocks: list[tuple[str, str]] = []
    fence, language = '', ''
    lines: list[str] = []
    for line in text.split('\n'):
        mark = _FENCE.match(line.rstrip())
        if not fence:
            if mark:
                fence, language, lines = mark[1], (mark[2].lower().split() or [''])[0], []
        elif mark and not mark[2] and len(mark[1]) >= len(fence):
            blocks.append((language, ''.join(lines)))
            fence = ''
        else:
            lines.append(f'{line}\n')
    return blocks


def _has_succeeded(result: ProgramResult) -> bool:
    return result.outcome == 'exited' and result.exit_code == 0


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _read_tests(given: Any) -> list[Any]:
    tests = list(cast('Sequence[Any]', given)) if isinstance(given, list | tuple) else [given]
    for index, test in enumerate(tests):
        if not isinstance(test, str) and not (isinstance(test, Mapping) and {'input', 'output'} <= test.keys()):
            raise InvalidRewardInput(f'tests[{index}]', "must be Python code, or a mapping with 'input' and 'output'")
    if not tests:
        raise InvalidRewardInput('tests', 'is empty; pass at least one test')
    return tests
