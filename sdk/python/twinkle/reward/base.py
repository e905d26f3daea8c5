"""The reward interface, and base classes for rewards that score a completion alone or against its ground truth."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, cast

from twinkle.data_format import user_data_get
from twinkle.reward.errors import InvalidRewardInput
from twinkle.reward.reading import completion_of


class Reward(ABC):
    """Scores trajectories. The completion is the last assistant turn of the chat."""

    @abstractmethod
    def __call__(
        self,
        trajectories: Sequence[Mapping[str, Any]],
        ground_truths: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> list[float]:
        """Return one number per trajectory, in order.

        Args:
            trajectories: trajectories, or features with `messages` and `user_data`.
            ground_truths: one per trajectory: the value, or a trajectory that contains it. None or empty: the
                ground truths are read from each trajectory's `user_data`.
            kwargs: additional information from the training loop; a reward ignores arguments that it does not use.

        Raises:
            InvalidRewardInput: a trajectory has no messages, or lacks data that the reward needs.
        """


class TextReward(Reward):
    """Scores each completion by its text only. Subclasses override `score`."""

    @abstractmethod
    def score(self, completion: str) -> float:
        """Return the score of one completion, which is '' if the chat has no assistant turn."""

    def __call__(
        self,
        trajectories: Sequence[Mapping[str, Any]],
        ground_truths: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> list[float]:
        """Return the score of each completion."""
        return [self.score(completion_of(trajectory, index)) for index, trajectory in enumerate(trajectories)]


class AnswerReward(Reward):
    """Scores each completion against its ground truth. Subclasses override `score`.

    Args:
        ground_truth_key: key of the ground truth in `user_data`.
    """

    def __init__(self, ground_truth_key: str = 'ground_truth') -> None:
        self.ground_truth_key = ground_truth_key

    @abstractmethod
    def score(self, completion: str, ground_truth: Any) -> float:
        """Return the score of one completion, which is '' if the chat has no assistant turn."""

    def __call__(
        self,
        trajectories: Sequence[Mapping[str, Any]],
        ground_truths: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> list[float]:
        """Return the score of each completion. All ground truths are read before the first completion is scored."""
        completions = [completion_of(trajectory, index) for index, trajectory in enumerate(trajectories)]
        truths = read_truths(self.ground_truth_key, trajectories, ground_truths)
        return [self.score(completion, truth) for completion, truth in zip(completions, truths, strict=True)]


def read_truths(key: str, trajectories: Sequence[Mapping[str, Any]], ground_truths: Sequence[Any] | None) -> list[Any]:
    """Return the ground truth of each trajectory, from `ground_truths` or from its `user_data`.

    Raises:
        InvalidRewardInput: a ground truth is missing, or `ground_truths` and `trajectories` differ in length.
    """
    if ground_truths is None or not len(ground_truths):
        return [_stored_truth(key, trajectory, f'trajectories[{i}]') for i, trajectory in enumerate(trajectories)]
    if len(ground_truths) != len(trajectories):
        problem = f'must have {len(trajectories)} items, one per trajectory, got {len(ground_truths)}'
        raise InvalidRewardInput('ground_truths', problem)
    return [_given_truth(key, given, f'ground_truths[{i}]') for i, given in enumerate(ground_truths)]


def _given_truth(key: str, given: Any, field: str) -> Any:
    if isinstance(given, Mapping) and 'user_data' in given:
        return _stored_truth(key, cast('Mapping[str, Any]', given), field)
    if given is None:
        raise InvalidRewardInput(field, 'must not be None; pass the expected answer')
    return cast('Any', given)


def _stored_truth(key: str, trajectory: Mapping[str, Any], field: str) -> Any:
    value = user_data_get(trajectory, key)
    if value is None:
        raise InvalidRewardInput(f'{field}.user_data', f'has no {key!r}; add it in the preprocessor')
    return value
