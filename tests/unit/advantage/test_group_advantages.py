"""Compares group advantages with values computed by hand, and checks properties that hold for all rewards.

Legend: P prompts, G completions of a prompt.
"""

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
"""Group size, and the rewards of 1 to 5 groups."""


def test_grpo_equals_the_normalized_reward_of_the_paper() -> None:
    """The advantage is the reward minus the group's mean, divided by the group's deviation (DeepSeekMath, 4.1.2)."""
    rewards = [0.0, 1.0, 0.0, 3.0, 5.0, 5.0, 1.0, 1.0]
    advantages = GRPOAdvantage(epsilon=1e-12)(rewards, num_generations=4, scale='group').tolist()
    expected = [
        (reward - statistics.mean(group)) / statistics.stdev(group)
        for group in (rewards[:4], rewards[4:])
        for reward in group
    ]
    assert advantages == pytest.approx(expected)
    assert expected[4] == pytest.approx(2 / 2.3094011)


def test_scales_divide_by_their_deviation() -> None:
    """Scale 'none' does not divide, and 'batch' divides by the standard deviation of the batch."""
    rewards = [0.0, 2.0, 10.0, 14.0]
    plain = GRPOAdvantage()(rewards, 2, 'none')
    assert plain.tolist() == [-1.0, 1.0, -2.0, 2.0]
    batch = GRPOAdvantage(epsilon=1e-12)(rewards, 2, 'batch')
    assert batch == pytest.approx(plain / statistics.stdev(rewards))


def test_rloo_baseline_is_the_mean_of_the_others() -> None:
    """An RLOO advantage is the reward minus the mean of the other rewards, for example 3 - (1 + 2 + 6) / 3 = 0."""
    assert RLOOAdvantage()([3.0, 1.0, 2.0, 6.0], num_generations=4) == pytest.approx([0, -8 / 3, -4 / 3, 4])


def test_rloo_is_unbiased() -> None:
    """An RLOO advantage rises by 10 if its reward rises by 10, because the baseline excludes this reward."""
    before = RLOOAdvantage()([1.0, 2.0, 3.0], 3)
    after = RLOOAdvantage()([11.0, 2.0, 3.0], 3)
    assert after[0] - before[0] == pytest.approx(10)
    assert GRPOAdvantage()([11.0, 2.0, 3.0], 3, 'none')[0] < 10


@given(REWARDS)
def test_advantages_of_a_group_sum_to_zero(case: tuple[int, list[list[float]]]) -> None:
    """The GRPO and RLOO advantages of a group sum to 0 for every scale."""
    group, rewards = case
    flat = [reward for row in rewards for reward in row]
    for estimator in (GRPOAdvantage(), RLOOAdvantage()):
        for scale in ('group', 'batch', 'none'):
            advantages = estimator(flat, group, scale).reshape(-1, group)
            assert np.isfinite(advantages).all()
            assert advantages.sum(axis=1) == pytest.approx(0, abs=1e-6)


@given(REWARDS, st.floats(-1000, 1000))
def test_constant_bonus_does_not_change_advantages(case: tuple[int, list[list[float]]], bonus: float) -> None:
    """A constant that is added to all rewards does not change unscaled GRPO advantages."""
    group, rewards = case
    flat = np.array(rewards).reshape(-1)
    assert GRPOAdvantage()(flat + bonus, group, 'none') == pytest.approx(GRPOAdvantage()(flat, group, 'none'), abs=1e-9)


@given(REWARDS)
def test_rloo_is_proportional_to_unscaled_grpo(case: tuple[int, list[list[float]]]) -> None:
    """The RLOO advantage in a group of k completions is k / (k - 1) times the unscaled GRPO advantage."""
    group, rewards = case
    flat = [reward for row in rewards for reward in row]
    assert RLOOAdvantage()(flat, group) == pytest.approx(
        GRPOAdvantage()(flat, group, 'none') * group / (group - 1), abs=1e-9
    )


def test_equal_rewards_have_zero_advantages() -> None:
    """Equal rewards have advantages of exactly 0, although the computed mean is rounded."""
    assert GRPOAdvantage()([0.1] * 3, 3).tolist() == [0.0] * 3
    assert RLOOAdvantage()([0.1] * 3, 3).tolist() == [0.0] * 3


def test_batch_is_one_group_by_default() -> None:
    """All completions are compared with each other if `num_generations` is unset."""
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
def test_invalid_rewards_are_refused(rewards: object, generations: object, field: str) -> None:
    """The error for invalid rewards or an invalid group size names the argument."""
    for estimator in (GRPOAdvantage(), RLOOAdvantage()):
        with pytest.raises(InvalidAdvantageInput) as caught:
            estimator(rewards, generations)
        assert caught.value.field == field


def test_scales_and_epsilons_are_checked() -> None:
    """An unknown scale and an epsilon of 0 are refused."""
    with pytest.raises(InvalidAdvantageInput):
        GRPOAdvantage()([1.0, 2.0], 2, 'prompt')
    with pytest.raises(InvalidAdvantageInput):
        GRPOAdvantage(epsilon=0)


def test_errors_are_picklable() -> None:
    """A pickled error keeps its field, problem and message."""
    error = InvalidAdvantageInput('rewards[1]', 'must be finite')
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.field, copy.problem, str(copy)) == (error.field, error.problem, str(error))


class BestOfOthers(GroupAdvantage):
    """Custom estimator whose baseline is the best other reward of the group."""

    def centre(self, rewards_PG: FloatVector) -> FloatVector:
        return rewards_PG - rewards_PG.max(axis=1, keepdims=True)


def test_custom_class_and_function_work() -> None:
    """A custom subclass sets the baseline; `build_advantage` accepts a function or a registered name."""
    assert BestOfOthers()([1.0, 4.0], 2, 'none').tolist() == [-3.0, 0.0]
    doubled = build_advantage(lambda rewards, **_: [2 * reward for reward in rewards])
    assert doubled([1.0, 2.0], num_generations=2) == [2.0, 4.0]
    assert isinstance(doubled, Advantage)
    assert isinstance(build_advantage('RLOOAdvantage', epsilon=1e-6), RLOOAdvantage)
    assert ADVANTAGES.names == ('GAEAdvantage', 'GRPOAdvantage', 'RLOOAdvantage')
