"""Advantages within groups, against figures worked by hand and laws that hold for all rewards."""

import pickle
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle.advantage import (
    ADVANTAGES,
    Advantage,
    FloatVector,
    GroupAdvantage,
    GRPOAdvantage,
    InvalidAdvantageInput,
    RLOOAdvantage,
    build_advantage,
)

REWARDS = st.integers(2, 6).flatmap(
    lambda group: st.tuples(
        st.just(group), st.lists(st.lists(st.floats(-100, 100), min_size=group, max_size=group), min_size=1, max_size=5)
    )
)
"""A group's size, and the rewards of some groups."""


def test_grpo_is_the_paper_s_normalized_reward() -> None:
    """DeepSeekMath, section 4.1.2: less the mean, over the standard deviation; two prompts do not touch."""
    rewards = [0.0, 1.0, 0.0, 3.0, 5.0, 5.0, 1.0, 1.0]
    advantages = GRPOAdvantage(epsilon=1e-12)(rewards, num_generations=4, scale='group').tolist()
    expected = [
        (reward - statistics.mean(group)) / statistics.stdev(group)
        for group in (rewards[:4], rewards[4:])
        for reward in group
    ]
    assert advantages == pytest.approx(expected)
    assert expected[4] == pytest.approx(2 / 2.3094011)


def test_scales_divide_by_what_they_say() -> None:
    """By nothing, or by the deviation of the whole batch."""
    rewards = [0.0, 2.0, 10.0, 14.0]
    plain = GRPOAdvantage()(rewards, 2, 'none')
    assert plain.tolist() == [-1.0, 1.0, -2.0, 2.0]
    batch = GRPOAdvantage(epsilon=1e-12)(rewards, 2, 'batch')
    assert batch == pytest.approx(plain / statistics.stdev(rewards))


def test_rloo_s_baseline_is_the_mean_of_the_others() -> None:
    """Ahmadian et al. 2024, section 2.2, by hand: 3 - (1 + 2 + 6) / 3 = 0."""
    assert RLOOAdvantage()([3.0, 1.0, 2.0, 6.0], num_generations=4) == pytest.approx([0, -8 / 3, -4 / 3, 4])


def test_rloo_is_unbiased() -> None:
    """A reward that others do not share changes its own advantage by as much: it is no part of its baseline."""
    before = RLOOAdvantage()([1.0, 2.0, 3.0], 3)
    after = RLOOAdvantage()([11.0, 2.0, 3.0], 3)
    assert after[0] - before[0] == pytest.approx(10)
    assert GRPOAdvantage()([11.0, 2.0, 3.0], 3, 'none')[0] < 10


@given(REWARDS)
def test_a_group_s_advantages_add_up_to_nothing(case: tuple[int, list[list[float]]]) -> None:
    """Under every scale, for both estimators, whatever was earned."""
    group, rewards = case
    flat = [reward for row in rewards for reward in row]
    for estimator in (GRPOAdvantage(), RLOOAdvantage()):
        for scale in ('group', 'batch', 'none'):
            advantages = estimator(flat, group, scale).reshape(-1, group)
            assert np.isfinite(advantages).all()
            assert advantages.sum(axis=1) == pytest.approx(0, abs=1e-6)


@given(REWARDS, st.floats(-1000, 1000))
def test_a_bonus_for_all_changes_nothing(case: tuple[int, list[list[float]]], bonus: float) -> None:
    """Advantages are relative."""
    group, rewards = case
    flat = np.array(rewards).reshape(-1)
    assert GRPOAdvantage()(flat + bonus, group, 'none') == pytest.approx(GRPOAdvantage()(flat, group, 'none'), abs=1e-9)


@given(REWARDS)
def test_rloo_is_grpo_unscaled_by_the_group_s_size(case: tuple[int, list[list[float]]]) -> None:
    """K / (k - 1) times the distance from the mean of all."""
    group, rewards = case
    flat = [reward for row in rewards for reward in row]
    assert RLOOAdvantage()(flat, group) == pytest.approx(
        GRPOAdvantage()(flat, group, 'none') * group / (group - 1), abs=1e-9
    )


def test_equal_rewards_prefer_nothing() -> None:
    """To the bit, though the mean of three tenths is not a tenth."""
    assert GRPOAdvantage()([0.1] * 3, 3).tolist() == [0.0] * 3
    assert RLOOAdvantage()([0.1] * 3, 3).tolist() == [0.0] * 3


def test_without_generations_the_batch_is_one_group() -> None:
    """The default of `num_generations` compares all completions with each other."""
    assert GRPOAdvantage()([1.0, 2.0, 6.0], scale='none').tolist() == [-2.0, -1.0, 3.0]


@pytest.mark.parametrize(
    ('rewards', 'generations', 'field'),
    [
        ([], 1, 'rewards'),
        ([1.0], 1, 'rewards'),
        ([1.0, float('nan')], 2, 'rewards[1]'),
        ([float('inf'), 1.0], 2, 'rewards[0]'),
        ([1e300, 1.0], 2, 'rewards[0]'),
        ([[1.0, 2.0]], 2, 'rewards'),
        (['a', 'b'], 2, 'rewards'),
        ([1.0, None], 2, 'rewards[1]'),
        (None, 2, 'rewards'),
        ([1.0, 2.0, 3.0], 2, 'num_generations'),
        ([1.0, 2.0], 0, 'num_generations'),
        ([1.0, 2.0], True, 'num_generations'),
        ([1.0, 2.0], 2.0, 'num_generations'),
    ],
)
def test_what_cannot_be_compared_is_refused(rewards: object, generations: object, field: str) -> None:
    """By an error that names the argument."""
    for estimator in (GRPOAdvantage(), RLOOAdvantage()):
        with pytest.raises(InvalidAdvantageInput) as caught:
            estimator(rewards, generations)
        assert caught.value.field == field


def test_scales_and_epsilons_are_checked() -> None:
    """Others than the three, and none at all."""
    with pytest.raises(InvalidAdvantageInput):
        GRPOAdvantage()([1.0, 2.0], 2, 'prompt')
    with pytest.raises(InvalidAdvantageInput):
        GRPOAdvantage(epsilon=0)


def test_errors_travel_between_processes() -> None:
    """They keep what they say."""
    error = InvalidAdvantageInput('rewards[1]', 'must be finite')
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.field, copy.problem, str(copy)) == (error.field, error.problem, str(error))


class BestOfOthers(GroupAdvantage):
    """A user's own."""

    def centre(self, rewards_PG: FloatVector) -> FloatVector:
        """Return rewards less the best of the group."""
        return rewards_PG - rewards_PG.max(axis=1, keepdims=True)


def test_a_user_s_own_class_and_function_work() -> None:
    """A subclass has the scales and the checks; a function is taken as it is."""
    assert BestOfOthers()([1.0, 4.0], 2, 'none').tolist() == [-3.0, 0.0]
    doubled = build_advantage(lambda rewards, **_: [2 * reward for reward in rewards])
    assert doubled([1.0, 2.0], num_generations=2) == [2.0, 4.0]
    assert isinstance(doubled, Advantage)
    assert isinstance(build_advantage('RLOOAdvantage', epsilon=1e-6), RLOOAdvantage)
    assert ADVANTAGES.names == ('GAEAdvantage', 'GRPOAdvantage', 'RLOOAdvantage')
