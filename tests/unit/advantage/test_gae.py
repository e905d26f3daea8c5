"""Tests of `GAEAdvantage`: the explicit sum of the paper, normalization, token rewards and refused arguments."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle.advantage import GAEAdvantage, InvalidAdvantageInput

NUMBERS = st.floats(-10, 10)
SEQUENCE = st.lists(st.tuples(NUMBERS, NUMBERS, st.booleans()), min_size=1, max_size=12)
"""Reward and value of each token, and whether the token is counted."""


def explicit_advantages(rewards: list[float], values: list[float], gamma: float, gae_lambda: float) -> list[float]:
    """Return the advantages of Schulman et al. 2016, eq. 16, computed as an explicit sum for each token."""
    count = len(rewards)
    next_values = [*values[1:], 0.0]
    deltas = [rewards[t] + gamma * next_values[t] - values[t] for t in range(count)]
    return [sum((gamma * gae_lambda) ** (s - t) * deltas[s] for s in range(t, count)) for t in range(count)]


@given(SEQUENCE, st.floats(0, 1), st.floats(0, 1))
def test_gae_is_the_sum_of_the_paper(steps: list[tuple[float, float, bool]], gamma: float, gae_lambda: float) -> None:
    """Advantages equal the paper's sum for every discount; masked tokens are skipped."""
    rewards, values, mask = (list(column) for column in zip(*steps, strict=True))
    mask[0] = True
    rewards = [reward * is_counted for reward, is_counted in zip(rewards, mask, strict=True)]
    counted = [index for index, is_counted in enumerate(mask) if is_counted]
    estimator = GAEAdvantage(gamma, gae_lambda, normalize=False)
    (advantages,), (returns,) = estimator([rewards], [values], masks=[mask])
    expected = explicit_advantages([rewards[i] for i in counted], [values[i] for i in counted], gamma, gae_lambda)
    assert advantages[counted] == pytest.approx(expected, abs=1e-9)
    assert returns[counted] == pytest.approx([gain + values[i] for gain, i in zip(expected, counted, strict=True)])
    masked = [index for index, is_counted in enumerate(mask) if not is_counted]
    assert not advantages[masked].any()
    assert not returns[masked].any()


@given(st.lists(st.booleans(), min_size=1, max_size=12), NUMBERS)
def test_a_score_reaches_every_token_that_counts(mask: list[bool], score: float) -> None:
    """The return of every counted token is the score if there are no discounts and no values, for any mask."""
    masks = [mask, [True]]
    rewards = GAEAdvantage.build_token_rewards([score, 0.0], [len(mask), 1], masks=masks)
    values = [[0.0] * len(row) for row in masks]
    advantages, returns = GAEAdvantage(1.0, 1.0, False)(rewards, values, masks=masks)
    assert advantages[0].tolist() == returns[0].tolist() == [score if is_counted else 0.0 for is_counted in mask]


def test_reward_of_a_masked_token_is_refused() -> None:
    """A reward of a masked token is refused, because it would be ignored."""
    rewards = GAEAdvantage.build_token_rewards([0.0, 1.0], [1, 3])
    with pytest.raises(InvalidAdvantageInput) as caught:
        GAEAdvantage()(rewards, [[0.0], [0.0, 0.0, 0.0]], masks=[[True], [True, False, False]])
    assert caught.value.field == 'rewards[1][2]'


def test_tokens_that_do_not_count_get_no_penalty() -> None:
    """Masked tokens, such as tool output, get no KL penalty."""
    rows = GAEAdvantage.build_token_rewards(
        [1.0],
        [3],
        old_logps=[[-1.0, -2.0, -9.0]],
        ref_logps=[[-1.5, -2.5, -1.0]],
        kl_coef=0.1,
        masks=[[True, True, False]],
    )
    assert rows[0] == pytest.approx([-0.05, 0.95, 0.0])


def test_lambda_one_is_the_return_minus_the_value() -> None:
    """The advantage with lambda 1 is the discounted return minus the value (eq. 18)."""
    (advantages,), (returns,) = GAEAdvantage(0.5, 1.0, normalize=False)([[1.0, 2.0, 4.0]], [[3.0, 5.0, 7.0]])
    assert returns.tolist() == [3.0, 4.0, 4.0]
    assert advantages.tolist() == [0.0, -1.0, -3.0]


def test_lambda_zero_looks_one_token_ahead() -> None:
    """The advantage with lambda 0 is the one-step temporal-difference error (eq. 17)."""
    (advantages,), _ = GAEAdvantage(1.0, 0.0, normalize=False)([[0.0, 1.0]], [[0.25, 0.5]])
    assert advantages.tolist() == [0.25, 0.5]


def test_normalized_advantages_have_mean_0_and_deviation_1_over_the_batch() -> None:
    """Advantages of all rows together have mean 0 and standard deviation 1; the returns are not normalized."""
    rewards, values = [[0.0, 1.0], [2.0, 0.0, 3.0]], [[0.5, 0.5], [1.0, 1.0, 1.0]]
    advantages, returns = GAEAdvantage()(rewards, values)
    pooled = np.concatenate(advantages)
    assert (pooled.mean(), pooled.std()) == (pytest.approx(0), pytest.approx(1))
    plain, same = GAEAdvantage(normalize=False)(rewards, values)
    assert [row.tolist() for row in same] == [row.tolist() for row in returns]
    assert [len(row) for row in plain] == [2, 3]


def test_single_token_is_not_normalized() -> None:
    """The advantage of a single token is not normalized."""
    (advantages,), _ = GAEAdvantage()([[2.0]], [[0.5]])
    assert advantages.tolist() == [1.5]


def test_last_token_gets_the_completion_reward() -> None:
    """The last token gets the completion's reward, and every token gets the KL penalty."""
    rows = GAEAdvantage.build_token_rewards(
        [1.0, -1.0], [2, 1], old_logps=[[-1.0, -2.0], [-3.0]], ref_logps=[[-1.5, -2.0], [-1.0]], kl_coef=0.1
    )
    assert rows[0] == pytest.approx([-0.05, 1.0])
    assert rows[1] == pytest.approx([-1.0 + 0.2])
    assert [row.tolist() for row in GAEAdvantage.build_token_rewards([2.0], [3])] == [[0.0, 0.0, 2.0]]


def test_mean_penalty_is_the_divergence() -> None:
    """The mean penalty over the policy's distribution is the policy's KL divergence from the reference."""
    policy, reference = (0.75, 0.25), (0.5, 0.5)
    divergence = sum(p * math.log(p / q) for p, q in zip(policy, reference, strict=True))
    penalties = [
        GAEAdvantage.build_token_rewards([0.0], [1], old_logps=[[math.log(p)]], ref_logps=[[math.log(q)]], kl_coef=1)
        for p, q in zip(policy, reference, strict=True)
    ]
    assert sum(p * -row[0][0] for p, row in zip(policy, penalties, strict=True)) == pytest.approx(divergence)


@pytest.mark.parametrize(
    ('arguments', 'field'),
    [
        (([], []), 'rewards'),
        (([[]], [[]]), 'rewards[0]'),
        (([[float('nan')]], [[0.0]]), 'rewards[0]'),
        (([[1.0]], [[0.0], [0.0]]), 'values'),
        (([[1.0, 2.0]], [[0.0]]), 'values[0]'),
        (([[1.0]], [[float('inf')]]), 'values[0][0]'),
        ((1.0, [[0.0]]), 'rewards'),
    ],
)
def test_inconsistent_sequences_are_refused(arguments: tuple[object, object], field: str) -> None:
    """The error for invalid or inconsistent sequences names the argument."""
    with pytest.raises(InvalidAdvantageInput) as caught:
        GAEAdvantage()(*arguments)
    assert caught.value.field.startswith(field)


def test_masks_without_counted_tokens_are_refused() -> None:
    """Masks that exclude all tokens are refused."""
    with pytest.raises(InvalidAdvantageInput):
        GAEAdvantage()([[1.0]], [[1.0]], masks=[[False]])


@pytest.mark.parametrize(
    ('options', 'field'),
    [
        ({'lengths': [1, 2]}, 'lengths'),
        ({'lengths': [0]}, 'lengths[0]'),
        ({'kl_coef': -1.0}, 'kl_coef'),
        ({'kl_coef': 0.1}, 'ref_logps'),
        ({'old_logps': [[0.0, 0.0]]}, 'ref_logps'),
        ({'old_logps': [[0.0]], 'ref_logps': [[0.0, 0.0]]}, 'old_logps[0]'),
        ({'masks': [[True]]}, 'masks[0]'),
    ],
)
def test_inconsistent_token_reward_arguments_are_refused(options: dict[str, object], field: str) -> None:
    """The error for an invalid or inconsistent argument names the argument."""
    with pytest.raises(InvalidAdvantageInput) as caught:
        GAEAdvantage.build_token_rewards([1.0], **{'lengths': [2], **options})
    assert caught.value.field == field


@pytest.mark.parametrize('options', [{'gamma': 1.5}, {'gae_lambda': -0.1}, {'gamma': float('nan')}])
def test_discounts_are_from_0_to_1(options: dict[str, float]) -> None:
    """A discount outside [0, 1] is refused when the estimator is created."""
    with pytest.raises(InvalidAdvantageInput):
        GAEAdvantage(**options)
