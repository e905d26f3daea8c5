"""The reward for the countdown game: reach a target number using each given number once."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from twinkle.data_format import user_data_get
from twinkle.reward.arithmetic import evaluate
from twinkle.reward.base import Reward
from twinkle.reward.errors import InvalidRewardInput
from twinkle.reward.reading import after_thinking, completion_of, tagged


class CountDownAccuracy(Reward):
    """1 if the last `<answer>` is an expression that equals `target` and uses each of `nums` once, else 0.

    Answers inside the thinking are ignored. `CountdownProcessor` stores target and numbers in `user_data`. The part of
    the answer from the first `=` on is ignored. Values are exact fractions, and the expression is not executed as code.
    """

    def __call__(
        self,
        trajectories: Sequence[Mapping[str, Any]],
        ground_truths: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> list[float]:
        """Return 1.0 or 0.0 for each game; `ground_truths` are mappings with `target` and `nums`, or trajectories."""
        games = list(ground_truths) if ground_truths is not None and len(ground_truths) else list(trajectories)
        if len(games) != len(trajectories):
            raise InvalidRewardInput('ground_truths', f'must have {len(trajectories)} items, got {len(games)}')
        completions = [completion_of(trajectory, index) for index, trajectory in enumerate(trajectories)]
        read = [_read_game(game, index) for index, game in enumerate(games)]
        return [
            self.score(completion, target, nums) for completion, (target, nums) in zip(completions, read, strict=True)
        ]

    @staticmethod
    def score(completion: str, target: int, nums: Sequence[int]) -> float:
        """Return 1.0 if the completion's answer reaches `target` with `nums`, else 0.0."""
        answer = (tagged(after_thinking(completion), 'answer') or '').partition('=')[0]
        try:
            value, used = evaluate(answer)
        except InvalidRewardInput:
            return 0.0
        return float(value == target and sorted(used) == sorted(nums))


def _read_game(game: Any, index: int) -> tuple[int, list[int]]:
    target, nums = (_part(game, key) for key in ('target', 'nums'))
    numbers: list[Any] = list(cast('Sequence[Any]', nums)) if isinstance(nums, list | tuple) else []
    if not isinstance(target, int) or not numbers or not all(isinstance(number, int) for number in numbers):
        raise InvalidRewardInput(
            f'trajectories[{index}].user_data', "needs an integer 'target' and a list of integers 'nums'"
        )
    return target, numbers


def _part(game: Any, key: str) -> Any:
    if not isinstance(game, Mapping):
        return None
    known = cast('Mapping[str, Any]', game)
    return known.get(key, user_data_get(known, key))
