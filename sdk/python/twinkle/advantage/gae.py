"""Generalized advantage estimation per token. Legend: T counted tokens of one completion."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from twinkle.advantage.base import Advantage, FloatVector, read_vector
from twinkle.advantage.errors import InvalidAdvantageInput

_DEVIATION_OFFSET = 1e-8
"""Added to the standard deviation before advantages are divided by it."""


class GAEAdvantage(Advantage):
    """Discounted sum of each token's temporal-difference errors.

    Schulman et al. 2016 (arXiv 1506.02438), eq. 16: `A_t = sum_l (gamma lambda)^l delta_{t+l}` with
    `delta_t = r_t + gamma V_{t+1} - V_t`, and `V = 0` after the last token of a completion.

    Args:
        gamma: discount of later rewards, from 0 to 1.
        gae_lambda: weight of later errors, from 0 to 1. A higher weight reduces the bias that inexact values cause, and
            increases the variance.
        normalize: whether to scale advantages to mean 0 and standard deviation 1 over the counted tokens of a batch.

    Raises:
        InvalidAdvantageInput: `gamma` or `gae_lambda` is out of range.
    """

    def __init__(
        self,
        gamma: float = 1.0,
        gae_lambda: float = 0.95,
        normalize: bool = True,  # noqa: FBT001, FBT002 - users pass it by position
    ) -> None:
        for name, value in (('gamma', gamma), ('gae_lambda', gae_lambda)):
            if not 0 <= value <= 1:
                raise InvalidAdvantageInput(name, f'must be from 0 to 1, got {value}')
        self.gamma, self.gae_lambda, self.normalize = gamma, gae_lambda, normalize

    @staticmethod
    def build_token_rewards(
        rewards: Sequence[float],
        lengths: Sequence[int],
        *,
        old_logps: Sequence[Sequence[float]] | None = None,
        ref_logps: Sequence[Sequence[float]] | None = None,
        kl_coef: float = 0.0,
        masks: Sequence[Sequence[bool]] | None = None,
    ) -> list[FloatVector]:
        """Return rewards per token, one float64 row per completion.

        The reward of each token that counts is its negated KL penalty. The last of these tokens also has the
        completion's reward, which is dropped if no token counts. All other tokens have reward 0.

        The penalty is `kl_coef (log p_old - log p_ref)` (Ziegler et al. 2019, arXiv 1909.08593, eq. 2). The mean of
        the difference, over tokens sampled from the policy, estimates the KL divergence from the reference.

        Args:
            rewards: one reward per completion.
            lengths: number of tokens of each completion, at least 1.
            old_logps: natural log-probability of each token under the policy that sampled it.
            ref_logps: natural log-probability of each token under the reference model.
            kl_coef: factor of the penalty, at least 0; a positive factor requires both log-probabilities.
            masks: true for tokens that count; the estimator must be called with the same masks. None counts all tokens.

        Raises:
            InvalidAdvantageInput: lengths do not match, a number is out of range, or log-probabilities are missing.
        """
        scores = read_vector('rewards', rewards)
        if len(lengths) != len(scores):
            raise InvalidAdvantageInput('lengths', f'must have {len(scores)} items, one per reward, got {len(lengths)}')
        if not (np.isfinite(kl_coef) and kl_coef >= 0):
            raise InvalidAdvantageInput('kl_coef', f'must be 0 or more, got {kl_coef}')
        if (old_logps is None) != (ref_logps is None) or (kl_coef and old_logps is None):
            raise InvalidAdvantageInput('ref_logps', 'must be given together with old_logps; kl_coef > 0 needs both')
        differences = [np.zeros(length) for length in _checked_lengths(lengths)]
        if old_logps is not None and ref_logps is not None:
            old = _read_rows('old_logps', old_logps, differences)
            reference = _read_rows('ref_logps', ref_logps, differences)
            differences = [old_T - ref_T for old_T, ref_T in zip(old, reference, strict=True)]
        counts = _read_masks(masks, differences)
        pairs = zip(differences, counts, strict=True)
        token_rewards = [np.where(is_counted, -kl_coef * difference, 0.0) for difference, is_counted in pairs]
        for row, is_counted, score in zip(token_rewards, counts, scores, strict=True):
            row[np.flatnonzero(is_counted)[-1:]] += score
        return token_rewards

    def __call__(
        self,
        rewards: Sequence[Sequence[float]],
        values: Sequence[Sequence[float]],
        *,
        masks: Sequence[Sequence[bool]] | None = None,
    ) -> tuple[list[FloatVector], list[FloatVector]]:
        """Return advantages and returns per token, one float64 row per completion.

        Args:
            rewards: rewards per token, as returned by `build_token_rewards`; rows may differ in length.
            values: predicted value at each token; rows have the same lengths as the rows of `rewards`.
            masks: true for tokens that count. Other tokens, such as tool output, are skipped; their reward must be 0,
                and their advantage and return are 0.

        Returns:
            The advantages and the returns. Returns are the unnormalized advantages plus the values, and serve as the
            targets of the value function.

        Raises:
            InvalidAdvantageInput: lengths do not match, a number is not finite or too large, no token counts, or a
                token that does not count has a reward.
        """
        token_rewards = [read_vector(f'rewards[{index}]', row) for index, row in enumerate(_rows('rewards', rewards))]
        expected = _read_rows('values', values, token_rewards)
        counts = _read_masks(masks, token_rewards)
        _refuse_masked_rewards(token_rewards, counts)
        if not any(row.any() for row in counts):
            raise InvalidAdvantageInput('masks', 'exclude all tokens; at least one must count')
        advantages: list[FloatVector] = []
        returns: list[FloatVector] = []
        for reward, value, is_counted in zip(token_rewards, expected, counts, strict=True):
            gains = np.zeros(len(reward))
            gains[is_counted] = self._discounted(reward[is_counted], value[is_counted])
            advantages.append(gains)
            returns.append(np.where(is_counted, gains + value, 0.0))
        return (_normalized(advantages, counts) if self.normalize else advantages), returns

    def _discounted(self, rewards_T: FloatVector, values_T: FloatVector) -> FloatVector:
        """Return the advantages of one completion's tokens."""
        deltas_T = rewards_T + self.gamma * np.append(values_T[1:], 0.0) - values_T
        gains_T = np.zeros(len(deltas_T))
        gain = 0.0
        for index in range(len(deltas_T) - 1, -1, -1):
            gain = deltas_T[index] + self.gamma * self.gae_lambda * gain
            gains_T[index] = gain
        return gains_T


def _normalized(advantages: list[FloatVector], counts: list[Any]) -> list[FloatVector]:
    """Return advantages with mean 0 and standard deviation 1 over counted tokens; a single token is unchanged."""
    pooled = np.concatenate([row[is_counted] for row, is_counted in zip(advantages, counts, strict=True)])
    if len(pooled) < 2:
        return advantages
    mean, deviation = pooled.mean(), pooled.std() + _DEVIATION_OFFSET
    pairs = zip(advantages, counts, strict=True)
    return [np.where(is_counted, (row - mean) / deviation, 0.0) for row, is_counted in pairs]


def _rows(field: str, rows: Any) -> list[Any]:
    """Return the rows of an argument as a list, which must not be empty."""
    try:
        listed = list(rows)
    except TypeError as error:
        raise InvalidAdvantageInput(field, 'must have one row of numbers per completion') from error
    if not listed:
        raise InvalidAdvantageInput(field, 'is empty; give at least one completion')
    return listed


def _read_rows(field: str, rows: Any, like: list[FloatVector]) -> list[FloatVector]:
    """Return rows of numbers with the lengths of the rows of `like`."""
    listed = _rows(field, rows)
    if len(listed) != len(like):
        raise InvalidAdvantageInput(field, f'must have {len(like)} rows, one for each completion, got {len(listed)}')
    read = [read_vector(f'{field}[{index}]', row) for index, row in enumerate(listed)]
    for index, (row, expected) in enumerate(zip(read, like, strict=True)):
        if len(row) != len(expected):
            raise InvalidAdvantageInput(f'{field}[{index}]', f'must have {len(expected)} tokens, got {len(row)}')
    return read


def _read_masks(masks: Any, like: list[FloatVector]) -> list[Any]:
    """Return boolean masks with the lengths of the rows of `like`. If `masks` is not given, all elements are true."""
    if masks is None:
        return [np.ones(len(row), dtype=bool) for row in like]
    return [row != 0 for row in _read_rows('masks', masks, like)]


def _refuse_masked_rewards(token_rewards: list[FloatVector], counts: list[Any]) -> None:
    for index, (row, is_counted) in enumerate(zip(token_rewards, counts, strict=True)):
        positions = np.flatnonzero(~is_counted & (row != 0))
        if len(positions):
            raise InvalidAdvantageInput(
                f'rewards[{index}][{positions[0]}]',
                'belongs to a masked token and would be ignored; give build_token_rewards the same masks',
            )


def _checked_lengths(lengths: Sequence[int]) -> list[int]:
    for index, length in enumerate(lengths):
        if isinstance(length, bool) or int(length) != length or length < 1:
            raise InvalidAdvantageInput(f'lengths[{index}]', f'must be an integer of at least 1, got {length}')
    return [int(length) for length in lengths]
