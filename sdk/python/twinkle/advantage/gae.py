"""Generalized advantage estimation, token by token."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from twinkle.advantage.base import Advantage, FloatVector, read_vector
from twinkle.advantage.errors import InvalidAdvantageInput

_SMALLEST_DEVIATION = 1e-8
"""Added to the standard deviation that advantages are divided by."""


class GAEAdvantage(Advantage):
    """Discounted sums of what each token brought beyond the value that was expected.

    Schulman et al. 2016 (arXiv 1506.02438), eq. 16: `A_t = sum_l (gamma lambda)^l delta_{t+l}` with
    `delta_t = r_t + gamma V_{t+1} - V_t`, and `V = 0` behind the last token of a completion.

    Args:
        gamma: discount of a later reward, from 0 to 1.
        gae_lambda: from 0 (one step ahead, biased by the values) to 1 (all of them, with their variance).
        normalize: whether advantages are brought to mean 0 and standard deviation 1 over the tokens of a batch.
    """

    def __init__(self, gamma: float = 1.0, gae_lambda: float = 0.95, *, normalize: bool = True) -> None:
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
    ) -> list[FloatVector]:
        """Return rewards of tokens: a completion's own at its last, less a penalty for leaving the reference at each.

        The penalty is `kl_coef (log p_old - log p_ref)` (Ziegler et al. 2019, arXiv 1909.08593, eq. 2), whose mean
        over tokens drawn from the policy is its divergence from the reference.

        Args:
            rewards: one for each completion.
            lengths: tokens of each completion, at least 1.
            old_logps: natural log-probability of each token under the policy that drew it.
            ref_logps: the same under the reference model.
            kl_coef: from 0 on; needs both of the above.

        Raises:
            InvalidAdvantageInput: sizes differ, a number is not finite, or log-probabilities are missing.
        """
        scores = read_vector('rewards', rewards)
        if len(lengths) != len(scores):
            raise InvalidAdvantageInput('lengths', f'must be {len(scores)}, one for each reward, got {len(lengths)}')
        if not (np.isfinite(kl_coef) and kl_coef >= 0):
            raise InvalidAdvantageInput('kl_coef', f'must be 0 or more, got {kl_coef}')
        if (old_logps is None) != (ref_logps is None) or (kl_coef and old_logps is None):
            raise InvalidAdvantageInput('ref_logps', 'and old_logps go together, and kl_coef needs both')
        differences = [np.zeros(length) for length in _checked_lengths(lengths)]
        if old_logps is not None and ref_logps is not None:
            drawn = _read_rows('old_logps', old_logps, differences)
            reference = _read_rows('ref_logps', ref_logps, differences)
            differences = [old - ref for old, ref in zip(drawn, reference, strict=True)]
        token_rewards = [-kl_coef * difference for difference in differences]
        for row, score in zip(token_rewards, scores, strict=True):
            row[-1] += score
        return token_rewards

    def __call__(
        self,
        rewards: Sequence[Sequence[float]],
        values: Sequence[Sequence[float]],
        *,
        masks: Sequence[Sequence[bool]] | None = None,
    ) -> tuple[list[FloatVector], list[FloatVector]]:
        """Return advantages and returns of tokens, a row for each completion.

        Args:
            rewards: of tokens, as `build_token_rewards` makes them; rows may differ in length.
            values: what was expected at each token, of the same lengths.
            masks: where tokens count. Others are stepped over, as what a tool wrote, and get 0 in both answers.

        Returns:
            Advantages, and returns to fit values to: advantages before they are normalized, plus values.

        Raises:
            InvalidAdvantageInput: sizes differ, a number is not finite, or no token counts.
        """
        token_rewards = [read_vector(f'rewards[{index}]', row) for index, row in enumerate(_rows('rewards', rewards))]
        expected = _read_rows('values', values, token_rewards)
        shown = masks if masks is not None else [np.ones(len(row)) for row in token_rewards]
        counts = [row != 0 for row in _read_rows('masks', shown, token_rewards)]
        if not any(row.any() for row in counts):
            raise InvalidAdvantageInput('masks', 'leave no token; mark at least one')
        advantages: list[FloatVector] = []
        returns: list[FloatVector] = []
        for reward, value, is_counted in zip(token_rewards, expected, counts, strict=True):
            gains = np.zeros(len(reward))
            gains[is_counted] = self._discounted(reward[is_counted], value[is_counted])
            advantages.append(gains)
            returns.append(np.where(is_counted, gains + value, 0.0))
        return (_normalized(advantages, counts) if self.normalize else advantages), returns

    def _discounted(self, rewards_T: FloatVector, values_T: FloatVector) -> FloatVector:
        """Return advantages of the tokens of one completion."""
        surprises_T = rewards_T + self.gamma * np.append(values_T[1:], 0.0) - values_T
        gains_T = np.zeros(len(surprises_T))
        gain = 0.0
        for index in range(len(surprises_T) - 1, -1, -1):
            gain = surprises_T[index] + self.gamma * self.gae_lambda * gain
            gains_T[index] = gain
        return gains_T


def _normalized(advantages: list[FloatVector], counts: list[Any]) -> list[FloatVector]:
    """Return advantages with mean 0 and standard deviation 1 over all that counts; a single one stays as it is."""
    pooled = np.concatenate([row[is_counted] for row, is_counted in zip(advantages, counts, strict=True)])
    if len(pooled) < 2:
        return advantages
    mean, deviation = pooled.mean(), pooled.std() + _SMALLEST_DEVIATION
    pairs = zip(advantages, counts, strict=True)
    return [np.where(is_counted, (row - mean) / deviation, 0.0) for row, is_counted in pairs]


def _rows(field: str, rows: Any) -> list[Any]:
    """Return what must be a row for each completion, at least one."""
    try:
        listed = list(rows)
    except TypeError as error:
        raise InvalidAdvantageInput(field, 'must be a row of numbers for each completion') from error
    if not listed:
        raise InvalidAdvantageInput(field, 'is empty; give at least one completion')
    return listed


def _read_rows(field: str, rows: Any, like: list[FloatVector]) -> list[FloatVector]:
    """Return rows of numbers as long as those of `like`."""
    listed = _rows(field, rows)
    if len(listed) != len(like):
        raise InvalidAdvantageInput(field, f'must have {len(like)} rows, one for each completion, got {len(listed)}')
    read = [read_vector(f'{field}[{index}]', row) for index, row in enumerate(listed)]
    for index, (row, model) in enumerate(zip(read, like, strict=True)):
        if len(row) != len(model):
            raise InvalidAdvantageInput(f'{field}[{index}]', f'must have {len(model)} tokens, got {len(row)}')
    return read


def _checked_lengths(lengths: Sequence[int]) -> list[int]:
    for index, length in enumerate(lengths):
        if isinstance(length, bool) or int(length) != length or length < 1:
            raise InvalidAdvantageInput(f'lengths[{index}]', f'must be a whole number, at least 1, got {length}')
    return [int(length) for length in lengths]
