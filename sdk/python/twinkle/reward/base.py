"""What a reward is, and the two kinds most of them are: of a completion alone, and against its ground truth."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, cast

from twinkle.data_format import user_data_get
from twinkle.reward.errors import InvalidRewardInput
from twinkle.reward.reading import completion_of


class Reward(ABC):
    """Scores trajectories: chats whose last turn of the assistant is the completion."""

    @abstractmethod
    def __call__(
        self,
        trajectories: Sequence[Mapping[str, Any]],
        ground_truths: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> list[float]:
        """Return one number for each trajectory, in their order.

        Args:
            trajectories: or features, which carry `messages` and `user_data` along.
            ground_truths: one for each trajectory: the value itself, or a trajectory that has it. None or none at
                all: each trajectory's `user_data` has its own.
            kwargs: what a loop knows beside, by name; a reward takes no notice of what it does not read.

        Raises:
            InvalidRewardInput: a trajectory has no messages, or lacks what the reward reads.
        """


class TextReward(Reward):
    """Scores each completion by its text alone. Subclasses override `score`."""

    @abstractmethod
    def score(self, completion: str) -> float:
        """Return the score of one completion; '' where the assistant said nothing."""

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
        ground_truth_key: of `user_data`, where the ground truth is.
    """

    def __init__(self, ground_truth_key: str = 'ground_truth') -> None:
        self.ground_truth_key = ground_truth_key

    @abstractmethod
    def score(self, completion: str, ground_truth: Any) -> float:
        """Return the score of one completion; '' where the assistant said nothing."""

    def __call__(
        self,
        trajectories: Sequence[Mapping[str, Any]],
        ground_truths: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> list[float]:
        """Return the score of each completion; every ground truth is read before the first is scored."""
        completions = [completion_of(trajectory, index) for index, trajectory in enumerate(trajectories)]
        truths = read_truths(self.ground_truth_key, trajectories, ground_truths)
        return [self.score(completion, truth) for completion, truth in zip(completions, truths, strict=True)]


def read_truths(key: str, trajectories: Sequence[Mapping[str, Any]], ground_truths: Sequence[Any] | None) -> list[Any]:
    """Return the ground truth of each trajectory, from beside it or from its `user_data`.

    Raises:
        InvalidRewardInput: there is none, or there are not as many as trajectories.
    """
    if ground_truths is None or not len(ground_truths):
        return [_own_truth(key, trajectory, f'trajectories[{i}]') for i, trajectory in enumerate(trajectories)]
    if len(ground_truths) != len(trajectories):
        problem = f'must be {len(trajectories)}, one for each trajectory, got {len(ground_truths)}'
        raise InvalidRewardInput('ground_truths', problem)
    return [_given_truth(key, given, f'ground_truths[{i}]') for i, given in enumerate(ground_truths)]


def _given_truth(key: str, given: Any, place: str) -> Any:
    if isinstance(given, Mapping) and 'user_data' in given:
        return _own_truth(key, cast('Mapping[str, Any]', given), place)
    if given is None:
        raise InvalidRewardInput(place, 'is None; give what is right')
    return cast('Any', given)


def _own_truth(key: str, trajectory: Mapping[str, Any], place: str) -> Any:
    value = user_data_get(trajectory, key)
    if value is None:
        raise InvalidRewardInput(f'{place}.user_data', f'has no {key!r}; let the preprocessor put it there')
    return value
