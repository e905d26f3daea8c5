"""Unit tests of the code execution reward, of user-defined rewards, and of the calls in the quick start."""

import re

import numpy as np
import pytest

from fixtures.sandbox import needs_walls
from twinkle.advantage import GRPOAdvantage
from twinkle.component import InvalidComponentOptions, UnknownComponent
from twinkle.metric import CompletionRewardMetric
from twinkle.reward import (
    REWARDS,
    CodeExecutionReward,
    FormatReward,
    GSM8KAccuracyReward,
    GSM8KFormatReward,
    InvalidRewardInput,
    InvalidRewardOutput,
    Reward,
    SandboxLimits,
    TextReward,
    build_reward,
)
from twinkle.reward.code_execution import program_of

pytestmark = pytest.mark.timeout(150)
GENEROUS_LIMITS = SandboxLimits(seconds=60, cpu_seconds=60)
"""Limits for programs that must exit by themselves, even on a slow machine."""


def chats(*completions: str, **more: object) -> list[dict[str, object]]:
    """Return one trajectory per completion."""
    return [{'messages': [{'role': 'assistant', 'content': completion}], **more} for completion in completions]


def program(*lines: str) -> str:
    """Return a completion with a fenced program."""
    return 'So:\n```python\n' + '\n'.join(lines) + '\n```\nThat is it.'


@needs_walls
def test_programs_score_the_fraction_of_tests_they_pass() -> None:
    """The score of correct, partly wrong, missing and failing programs is the fraction of tests that they pass."""
    tests = [{'input': '2\n', 'output': '4'}, {'input': '3\n', 'output': '9\n'}]
    completions = [
        program('print(int(input()) ** 2)'),
        program('print(int(input()) + 2)'),
        'print(int(input()) ** 2)',
        program('print(int(input()) ** 2)', 'raise SystemExit(1)'),
    ]
    reward = CodeExecutionReward(limits=GENEROUS_LIMITS, num_workers=2)
    assert reward(chats(*completions, user_data={'tests': tests})) == [1.0, 0.5, 0.0, 0.0]


@needs_walls
def test_a_program_that_does_not_exit_scores_0() -> None:
    """A program that exceeds its time limit is stopped and scores 0, even if its output is correct."""
    endless = program('print(4, flush=True)', 'while True: pass')
    tests = {'input': '2\n', 'output': '4'}
    assert CodeExecutionReward(limits=SandboxLimits(seconds=2))(chats(endless), [tests]) == [0.0]


@needs_walls
def test_programs_can_be_tested_by_assertions() -> None:
    """Assertions determine the score, and a program cannot pass by exiting before them."""
    square = ['def square(x):', '    return x * x']
    completions = [program(*square), program(*square[:1], '    return 4'), program(*square, 'raise SystemExit(0)')]
    tests = ['assert square(2) == 4', 'assert square(3) == 9']
    assert CodeExecutionReward(limits=GENEROUS_LIMITS)(chats(*completions), [tests] * 3) == [1.0, 0.5, 0.0]


@pytest.mark.parametrize(
    ('completion', 'expected'),
    [
        ('```python\nx\n```', 'x\n'),
        ('```Python3 title="a"\nx\n```\n', 'x\n'),
        ('```bash\nls\n```\nand\n```python\nx\n```\nprints\n```text\n7\n```\n', 'x\n'),
        ('```json\n{}\n```\nso\n```\nx\n```', 'x\n'),
        ('```python\nx\n```\nprints\n```\n7\n```', 'x\n'),
        ('```py\nx\n```\n```py\ny\n```', 'y\n'),
        ('```py\nx\n```\n```py\ny', 'x\n'),
        ('```py\nx = """\n\t```\n"""\nprint("```")\n```', 'x = """\n\t```\n"""\nprint("```")\n'),
        ('````py\n"""\n```\n"""\n````', '"""\n```\n"""\n'),
        ('It is ```x```.\n```\ny\n```', 'y\n'),
        ('```py\r\nx\r\n```\r\n', 'x\r\n'),
        ('```py\n```', ''),
        ('```bash\nls\n```', None),
        ('<think>```py\nx\n```</think>none', None),
        ('<think>\n```py\nx\n```\n', None),
        ('```py\n' * 20_000, None),
        ('', None),
    ],
    ids=range(17),
)
def test_the_last_closed_python_block_is_the_program(completion: str, expected: str | None) -> None:
    """The program is the last closed Python block or, without a Python block, the last unmarked block."""
    assert program_of(completion) == expected


def test_malformed_tests_are_refused() -> None:
    """Malformed tests raise InvalidRewardInput before any program runs."""
    for tests in ([], [{'input': '1'}], [3]):
        with pytest.raises(InvalidRewardInput):
            CodeExecutionReward()(chats(program('pass')), [tests])
    with pytest.raises(InvalidRewardInput):
        CodeExecutionReward(num_workers=0)


class Politeness(TextReward):
    """A user-defined reward that overrides `score`."""

    def score(self, completion: str) -> float:
        """Return 1.0 for a polite completion."""
        return float('please' in completion)


class CountDown(Reward):
    """A user-defined reward that overrides `__call__`, as in the quick start."""

    def __call__(self, trajectories, ground_truths):
        """Return 1.0 for a completion with a digit."""
        return [float(bool(re.search(r'\d', row['messages'][-1]['content']))) for row in trajectories]


def test_user_defined_classes_and_functions_work() -> None:
    """A reward can be defined by `score`, by `__call__` or by a plain function."""
    rows = chats('yes, please', '7')
    assert Politeness()(rows) == [1.0, 0.0]
    assert CountDown()(rows, []) == [0.0, 1.0]
    assert build_reward(Politeness)(rows, []) == [1.0, 0.0]

    def lengths(trajectories: list[dict[str, object]], factor: float = 1) -> list[float]:
        return [np.float32(factor * len(row['messages'][0]['content'])) for row in trajectories]

    assert build_reward(lengths)(rows) == [11.0, 1.0]
    assert build_reward(lengths)(rows, factor=2) == [22.0, 2.0]


@pytest.mark.parametrize('answer', [[1.0], [1.0, float('nan')], [1.0, 'good'], []])
def test_a_function_with_an_invalid_result_is_refused(answer: list[object]) -> None:
    """A function that does not return one finite number per trajectory raises InvalidRewardOutput."""
    with pytest.raises(InvalidRewardOutput):
        build_reward(lambda trajectories: answer)(chats('a', 'b'))


def test_rewards_are_built_by_name() -> None:
    """Rewards are built by name with options, and unknown names and options are refused."""
    assert isinstance(build_reward('FormatReward'), FormatReward)
    assert build_reward('LengthReward', max_length=10, cache_length=2)(chats('a'), completion_lengths=[9]) == [-0.5]
    assert {'MathReward', 'MultiModalAccuracyReward', 'OlympiadBenchQualityReward'} <= set(REWARDS.names)
    with pytest.raises(UnknownComponent):
        build_reward('NoSuchReward')
    with pytest.raises(InvalidComponentOptions):
        build_reward('LengthReward', max_length=0, cache_length=2)
    with pytest.raises(InvalidComponentOptions):
        build_reward(lambda trajectories: [], size=2)


def test_the_calls_of_the_quick_start_run() -> None:
    """Rewards of features can be summed and passed to metrics and advantages."""
    features = chats('#### 4', '4', '#### 5', r'\boxed{4}', user_data=[('ground_truth', '"4"')], input_ids=[1, 2])
    accuracy_rewards, format_rewards = GSM8KAccuracyReward()(features), GSM8KFormatReward()(features)
    total_rewards = [a + f for a, f in zip(accuracy_rewards, format_rewards, strict=True)]
    metrics = CompletionRewardMetric()
    metrics.accumulate(completion_lengths=[2] * 4, rewards={'total': total_rewards, 'accuracy': accuracy_rewards})
    advantages = GRPOAdvantage()(total_rewards, num_generations=4, scale='group').tolist()
    assert total_rewards == [2.0, 0.0, 1.0, 2.0]
    assert metrics.calculate()['train/total_reward'] == 1.25
    assert advantages[0] == advantages[3] > 0 > advantages[2] > advantages[1]
