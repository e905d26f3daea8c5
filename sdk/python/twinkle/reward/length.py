"""A penalty for completions close to or above the length limit."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from twinkle.data_format import IGNORE_INDEX
from twinkle.reward.base import Reward
from twinkle.reward.errors import InvalidRewardInput


class LengthReward(Reward):
    """0 for short completions, decreasing to -1 at the length limit.

    DAPO (arXiv 2503.14476), eq. 13, soft overlong punishment: 0 up to `max_length - cache_length` tokens, -1 above
    `max_length`, and linear in between.

    Args:
        max_length: length limit in tokens, at least 1.
        cache_length: number of tokens below `max_length` over which the penalty grows, from 1 to `max_length`.

    Raises:
        InvalidRewardInput: a length is out of range.
    """

    def __init__(self, max_length: int, cache_length: int) -> None:
        if max_length < 1:
            raise InvalidRewardInput('max_length', f'must be at least 1, got {max_length}')
        if not 1 <= cache_length <= max_length:
            raise InvalidRewardInput('cache_length', f'must be from 1 to {max_length}, got {cache_length}')
        self.max_length, self.cache_length = max_length, cache_length

    def __call__(
        self,
        trajectories: Sequence[Mapping[str, Any]],
        ground_truths: Sequence[Any] | None = None,
        *,
        completion_lengths: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> list[float]:
        """Return the penalty of each completion.

        Args:
            trajectories: features; the length of a completion is its number of labels that are not ignored.
            ground_truths: ignored.
            completion_lengths: lengths in tokens, used instead of the labels.
            kwargs: ignored.

        Raises:
            InvalidRewardInput: `completion_lengths` does not have one item per trajectory, or is not given and a
                trajectory has no labels.
        """
        if completion_lengths is None:
            completion_lengths = [_labels(trajectory, index) for index, trajectory in enumerate(trajectories)]
        if len(completion_lengths) != len(trajectories):
            problem = f'must have {len(trajectories)} items, one per trajectory, got {len(completion_lengths)}'
            raise InvalidRewardInput('completion_lengths', problem)
        free = self.max_length - self.cache_length
        return [min(0.0, max(-1.0, (free - length) / self.cache_length)) for length in completion_lengths]


def _labels(trajectory: Mapping[str, Any], index: int) -> int:
    if trajectory.get('labels') is None:
        raise InvalidRewardInput(
            f'trajectories[{index}].labels', 'is missing; pass features with labels, or completion_lengths'
        )
    return int((np.asarray(trajectory['labels']) != IGNORE_INDEX).sum())
