"""Programs that a model wrote, scored by the tests they pass."""

import re
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from twinkle.reward.base import AnswerReward, read_truths
from twinkle.reward.errors import InvalidRewardInput
from twinkle.reward.reading import after_thinking, completion_of
from twinkle.reward.sandbox import ProgramResult, SandboxLimits, run_program

_FENCE = re.compile(r' {0,3}(`{3,})[ \t]*([^`]*)$')
"""A line that opens or closes a block, and what the block says of its language (CommonMark 0.31, section 4.5)."""
_PYTHON = ('python', 'py', 'python3')


class CodeExecutionReward(AnswerReward):
    """The share of tests that the last fenced program of a completion passes; 0 where there is no program.

    Tests are the ground truth: pairs `{'input': ..., 'output': ...}` of what the program is given and has to print,
    spaces at ends of lines aside, or Python such as `assert f(2) == 4`, which is run behind the program.

    Programs run behind walls, one process for each test; see `run_program` for what these keep apart and what not. A
    program shares its process with assertions behind it and could look for them; pairs keep what is expected to us.

    Args:
        ground_truth_key: of `user_data`, where the tests are, one or a list.
        limits: what each run may use.
        num_workers: programs that run at once.
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
        """Return the share of tests that each program passes.

        Raises:
            InvalidRewardInput: tests are missing or of another form.
            SandboxUnavailable: this machine lacks walls.
            ProgramNotStarted: the limits leave the interpreter no room to start.
        """
        completions = [completion_of(trajectory, index) for index, trajectory in enumerate(trajectories)]
        tests = [_read_tests(truth) for truth in read_truths(self.ground_truth_key, trajectories, ground_truths)]
        with ThreadPoolExecutor(self.num_workers) as pool:
            return list(pool.map(self.score, completions, tests))

    def score(self, completion: str, ground_truth: Any) -> float:
        """Return the share of tests that one program passes."""
        source, tests = program_of(completion), _read_tests(ground_truth)
        if source is None:
            return 0.0
        return sum(self._passes(source, test) for test in tests) / len(tests)

    def _passes(self, source: str, test: Any) -> bool:
        if isinstance(test, str):
            # A program that ends early, whatever its exit code, never gets to say this word.
            word = secrets.token_hex(16)
            result = run_program(f'{source}\n{test}\nprint({word!r})\n', limits=self.limits)
            return _has_ended(result) and result.stdout.endswith(f'{word}\n')
        result = run_program(source, str(test['input']), self.limits)
        return _has_ended(result) and _lines(result.stdout) == _lines(str(test['output']))


def program_of(completion: str) -> str | None:
    """Return the last whole fenced block behind the thinking that says it is Python, else the last that says nothing.

    None where there is neither; blocks of another language are no programs.
    """
    blocks = _fenced_blocks(after_thinking(completion))
    programs = [text for language, text in blocks if language in _PYTHON]
    unlabelled = [text for language, text in blocks if not language]
    return next(iter([*programs[-1:], *unlabelled[-1:]]), None)


def _fenced_blocks(text: str) -> list[tuple[str, str]]:
    """Return the language and the text of each block whose fence is closed."""
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


def _has_ended(result: ProgramResult) -> bool:
    return result.outcome == 'exited' and result.exit_code == 0


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _read_tests(given: Any) -> list[Any]:
    tests = list(cast('Sequence[Any]', given)) if isinstance(given, list | tuple) else [given]
    for index, test in enumerate(tests):
        if not isinstance(test, str) and not (isinstance(test, Mapping) and {'input', 'output'} <= test.keys()):
            raise InvalidRewardInput(f'tests[{index}]', "must be Python, or have an 'input' and an 'output'")
    if not tests:
        raise InvalidRewardInput('tests', 'are none; give at least one')
    return tests
