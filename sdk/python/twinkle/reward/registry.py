"""The registry of rewards, and `build_reward`, which also accepts plain functions."""

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from twinkle.component import ComponentRegistry, InvalidComponentOptions
from twinkle.reward.base import Reward
from twinkle.reward.code_execution import CodeExecutionReward
from twinkle.reward.countdown import CountDownAccuracy
from twinkle.reward.errors import InvalidRewardOutput
from twinkle.reward.f1 import F1Reward
from twinkle.reward.format_reward import FormatReward
from twinkle.reward.gsm8k import GSM8KAccuracyReward, GSM8KFormatReward
from twinkle.reward.length import LengthReward
from twinkle.reward.math_reward import MathReward
from twinkle.reward.multi_modal import MultiModalAccuracyReward
from twinkle.reward.olympiad_bench import (
    OlympiadBenchAccuracyReward,
    OlympiadBenchFormatReward,
    OlympiadBenchQualityReward,
)

REWARDS = ComponentRegistry(
    'reward',
    Reward,
    (
        CodeExecutionReward,
        CountDownAccuracy,
        F1Reward,
        FormatReward,
        GSM8KAccuracyReward,
        GSM8KFormatReward,
        LengthReward,
        MathReward,
        MultiModalAccuracyReward,
        OlympiadBenchAccuracyReward,
        OlympiadBenchFormatReward,
        OlympiadBenchQualityReward,
    ),
)
"""Built-in and registered rewards, by name."""


class _FunctionReward(Reward):
    """Adapts a plain function of trajectories to the reward interface."""

    def __init__(self, function: Callable[..., Sequence[float]]) -> None:
        self._function = function

    def __call__(
        self,
        trajectories: Sequence[Mapping[str, Any]],
        ground_truths: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> list[float]:
        """Call the function and check its result.

        Raises:
            InvalidRewardOutput: the function did not return one finite number per trajectory.
        """
        given = {**kwargs, **({} if ground_truths is None else {'ground_truths': ground_truths})}
        rewards = list(self._function(trajectories, **given))
        name = getattr(self._function, '__name__', type(self._function).__name__)
        if len(rewards) != len(trajectories):
            raise InvalidRewardOutput(
                name, f'must return one number per trajectory, returned {len(rewards)} for {len(trajectories)}'
            )
        for index, reward in enumerate(rewards):
            if not isinstance(reward, numbers.Real) or not math.isfinite(reward):
                raise InvalidRewardOutput(name, f'must return finite numbers, got {reward!r} for trajectories[{index}]')
        return [float(reward) for reward in rewards]


def build_reward(reward: 'str | type[Reward] | Reward | Callable[..., Sequence[float]]', **options: Any) -> Reward:
    """Build a reward from its name, a plugin id, its class, an instance, or a function of trajectories.

    Raises:
        UnknownComponent: the name is not registered.
        InvalidComponentOptions: an option is unknown or invalid, or options are given for an instance or a function.
        PluginRefused: plugins are not allowed, or the plugin does not contain exactly one reward.
        HubError: a plugin cannot be downloaded.
    """
    if isinstance(reward, str | type | Reward):
        return REWARDS.build(reward, options)
    if options:
        raise InvalidComponentOptions('reward', repr(reward), 'a function takes no options')
    return _FunctionReward(reward)
