"""Unit tests of mathematical rewards: equality of answers, time limits and the judge process."""

import logging
import multiprocessing
import os
import pickle
import time

import pytest

from fixtures.sandbox import children, needs_walls
from fixtures.tiers import mostly_slow
from twinkle.component import MissingLibrary
from twinkle.reward import (
    InvalidRewardInput,
    MathJudge,
    MathReward,
    MultiModalAccuracyReward,
)
from twinkle.reward.math_judge import require_library, warn_of_missing_walls

pytestmark = pytest.mark.timeout(200)


def chats(*completions: str) -> list[dict[str, object]]:
    """Return one trajectory per completion."""
    return [{'messages': [{'role': 'assistant', 'content': completion}]} for completion in completions]


@pytest.fixture(scope='module')
def reward() -> MathReward:
    """Return a reward that several tests share; it has a process."""
    return MathReward(seconds=60)


@pytest.mark.parametrize(
    ('completion', 'truth', 'expected'),
    [
        (r'so \boxed{\frac{1}{2}}', '0.5', 1.0),
        (r'\boxed{1,000}', '1000', 1.0),
        (r'\boxed{x^2 + 2x + 1}', '(x+1)^2', 1.0),
        (r'\boxed{2\sqrt{2}}', r'\sqrt{8}', 1.0),
        (r'\boxed{\{2, 1\}}', r'\{1, 2\}', 1.0),
        (r'\boxed{(1, 2]}', '[1, 2]', 0.0),
        (r'\boxed{3} no, \boxed{4}', '4', 1.0),
        (r'\boxed{4} no, \boxed{3}', '4', 0.0),
        (r'<think>\boxed{4}</think>\boxed{5}', '4', 0.0),
        ('<answer>3/4</answer>', '0.75', 1.0),
        (r'<answer>\boxed{3/4}</answer>', '0.75', 1.0),
        ('The answer is 7', '7', 1.0),
        ('The answer is 8', '7', 0.0),
        (r'\boxed{}', '7', 0.0),
        ('', '7', 0.0),
        (r'\boxed{7', '8', 0.0),
        (r'<think>so \boxed{4}', '4', 0.0),
        (r'\boxed{\$18}', '18', 1.0),
        (r'\boxed{4 or rather \boxed{5}', '5', 1.0),
        (r'\boxed{12}', r'The sum is 7 + 5, so it is \boxed{12}.', 1.0),
        (r'\boxed{3}', [2, 3], 1.0),
        (r'\boxed{3}', 3, 1.0),
    ],
)
def test_answers_are_compared_by_meaning(reward: MathReward, completion: str, truth: object, expected: float) -> None:
    """Answers are compared as LaTeX, numbers or sets; the last marked answer after the thinking counts."""
    assert reward(chats(completion), [truth]) == [expected]


@pytest.mark.parametrize(
    'answer',
    mostly_slow(
        ['9^{9^{9^{9}}} + 1', '100000000!', r'\prod_{n=1}^{100000000} n', '(' * 900 + '1' + ')' * 900, 'x' * 100_000]
    ),
)
def test_slow_expressions_are_wrong_after_the_time_limit(answer: str) -> None:
    """An answer that exceeds the time limit is wrong, and a new process judges the next answer."""
    before, began = children(), time.monotonic()
    judge = MathJudge(0.5)
    assert not judge.is_same('2', f'\\boxed{{{answer}}}')
    assert time.monotonic() - began < 60
    assert children() <= before
    judge.seconds = 60
    assert judge.is_same(r'\boxed{a+b}', r'\boxed{b+a}')
    judge.close()


def test_an_answer_is_not_executed(reward: MathReward) -> None:
    """An answer that is a program is wrong and is not executed."""
    answers = ['__import__("os").getppid()', '().__class__', r'\input{/etc/passwd}', 'exit()']
    assert reward(chats(*(f'\\boxed{{{answer}}}' for answer in answers)), [str(os.getpid())] * 4) == [0.0] * 4


def test_a_judge_can_be_pickled_and_closed() -> None:
    """An unpickled judge starts its own process; a closed judge starts a new process when needed."""
    judge = MathJudge(60)
    assert judge.is_same(r'\boxed{a+b}', r'\boxed{b+a}')
    copy = pickle.loads(pickle.dumps(judge))
    assert copy.is_same(r'\boxed{2a}', r'\boxed{a+a}')
    copy.close()
    judge.close()
    judge.close()
    assert not judge.is_same(r'\boxed{a}', r'\boxed{b}')
    judge.close()


def own_records(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return the library's log records, without warnings that earlier tests caused."""
    return [record for record in caplog.records if record.name.startswith('twinkle')]


@needs_walls
def test_a_judge_with_all_walls_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """No warning is logged if all walls are active."""
    warn_of_missing_walls.cache_clear()
    judge = MathJudge(60)
    assert judge.is_same(r'\boxed{a+b}', r'\boxed{b+a}')
    judge.close()
    assert own_records(caplog) == []


def test_missing_walls_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """The warning about missing walls is logged once per process, not once per judge."""
    warn_of_missing_walls.cache_clear()
    for _ in range(3):
        warn_of_missing_walls(('files',))
    assert [record.levelname for record in own_records(caplog)] == ['WARNING']


def test_a_forked_judge_does_not_stop_the_parents_process() -> None:
    """Closing a judge in a forked process does not stop the parent's judge process."""
    judge = MathJudge(60)
    assert judge.is_same(r'\boxed{a+b}', r'\boxed{b+a}')
    begun = children()
    child = multiprocessing.get_context('fork').Process(target=judge.close)
    child.start()
    child.join()
    assert child.exitcode == 0
    assert children()
    assert children() <= begun
    assert judge.is_same(r'\boxed{2a}', r'\boxed{a+a}')
    judge.close()


def test_the_ground_truth_key_is_configurable() -> None:
    """The ground truth is read from the configured key, and the error for a missing key names the key."""
    trajectory = {**chats(r'\boxed{4}')[0], 'user_data': [('id', '7'), ('solution', '"4"')]}
    assert MathReward('solution')([trajectory]) == [1.0]
    with pytest.raises(InvalidRewardInput) as caught:
        MathReward()([trajectory])
    assert caught.value.field == 'trajectories[0].user_data'


def test_a_missing_library_is_named_with_its_extra() -> None:
    """MissingLibrary names the missing library's extra."""
    with pytest.raises(MissingLibrary) as caught:
        require_library('no_such_library', 'rewards')
    assert (caught.value.library, caught.value.install) == ('no-such-library', 'twinkle-grpc[rewards]')
    assert pickle.loads(pickle.dumps(caught.value)).install == caught.value.install


@pytest.fixture(scope='module')
def multimodal() -> MultiModalAccuracyReward:
    """Return a reward that all questions share; it has a process."""
    return MultiModalAccuracyReward(seconds=60)


@pytest.mark.parametrize(
    ('completion', 'truth', 'expected'),
    [
        ('<answer>B</answer>', 'B', 1.0),
        ('<answer>(b) a red car</answer>', 'B', 1.0),
        ('<think>A or B</think><answer>A</answer>', 'B', 0.0),
        ('<answer>A red  car.</answer>', 'a red car', 1.0),
        ('<answer>a blue car</answer>', 'a red car', 0.0),
        (r'\boxed{\frac{3}{6}}', '0.5', 1.0),
        ('<answer>0.5</answer>', '<answer>1/2</answer>', 1.0),
        ('Two cats', 'two cats', 1.0),
        ('<think><answer>B</answer>', 'B', 0.0),
        ('', 'B', 0.0),
    ],
)
def test_multimodal_answers_are_choices_words_or_formulas(
    multimodal: MultiModalAccuracyReward, completion: str, truth: str, expected: float
) -> None:
    """Choices, words and formulas are each compared by their own rule."""
    assert multimodal(chats(completion), [truth]) == [expected]
