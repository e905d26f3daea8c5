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

    def __init__(
        self,
        gamma: float = 1.0,
        gae_lambda: float = 0.95,
        normalize: bool = True,  # noqa: FBT001, FBT002 - users pass it by place
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
        """Return rewards of tokens: a completion's own at its last, less a penalty for leaving the reference at each.

        Only tokens that count are meant by both: the last of them has the score, the others have 0. A completion in
        which none counts has nowhere to put its score, and is 0 throughout.

        The penalty is `kl_coef (log p_old - log p_ref)` (Ziegler et al. 2019, arXiv 1909.08593, eq. 2), whose mean
        over tokens drawn from the policy is its divergence from the reference.

        Args:
            rewards: one for each completion.
            lengths: tokens of each completion, at least 1.
            old_logps: natural log-probability of each token under the policy that drew it.
            ref_logps: the same under the reference model.
            kl_coef: from 0 on; needs both of the above.
            masks: where tokens count, as they are given to the estimator. Unset: everywhere.

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
        """Return advantages and returns of tokens, a row for each completion.

        Args:
            rewards: of tokens, as `build_token_rewards` makes them; rows may differ in length.
            values: what was expected at each token, of the same lengths.
            masks: where tokens count. Others are stepped over, as what a tool wrote, and get 0 in both answers; they
                must have brought 0.

        Returns:
            Advantages, and returns to fit values to: advantages before they are normalized, plus values.

        Raises:
            InvalidAdvantageInput: sizes differ, a number is not finite, no token counts, or one that does not has a
                reward, which would be lost.
        """
        token_rewards = [read_vector(f'rewards[{index}]', row) for index, row in enumerate(_rows('rewards', rewards))]
        expected = _read_rows('values', values, token_rewards)
        counts = _read_masks(masks, token_rewards)
        _refuse_lost(token_rewards, counts)
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


def _read_masks(masks: Any, like: list[FloatVector]) -> list[Any]:
    """Return where tokens count, in rows as long as those of `like`; everywhere where nothing is said."""
    if masks is None:
        return [np.ones(len(row), dtype=bool) for row in like]
    return [row != 0 for row in _read_rows('masks', masks, like)]


def _refuse_lost(token_rewards: list[FloatVector], counts: list[Any]) -> None:
    for index, (row, is_counted) in enumerate(zip(token_rewards, counts, strict=True)):
        lost = np.flatnonzero(~is_counted & (row != 0))
        if len(lost):
            raise InvalidAdvantageInput(
                f'rewards[{index}][{lost[0]}]',
                'is of a token that masks leave out, and would be lost; give build_token_rewards the same masks',
            )


def _checked_lengths(lengths: Sequence[int]) -> list[int]:
    for index, length in enumerate(lengths):
        if isinstance(length, bool) or int(length) != length or length < 1:
            raise InvalidAdvantageInput(f'lengths[{index}]', f'must be a whole number, at least 1, got {length}')
    return [int(length) for length in lengths]
