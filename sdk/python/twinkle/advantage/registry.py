"""Advantages by name."""

from collections.abc import Callable
from typing import Any

from twinkle.advantage.base import Advantage
from twinkle.advantage.gae import GAEAdvantage
from twinkle.advantage.grpo import GRPOAdvantage
from twinkle.advantage.rloo import RLOOAdvantage
from twinkle.component import ComponentRegistry, InvalidComponentOptions

ADVANTAGES = ComponentRegistry('advantage', Advantage, (GAEAdvantage, GRPOAdvantage, RLOOAdvantage))
"""Registered advantages by name."""


class _FunctionAdvantage(Advantage):
    """Advantage that calls a plain function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, rewards: Any, *args: Any, **kwargs: Any) -> Any:
        return self._function(rewards, *args, **kwargs)


def build_advantage(advantage: 'str | type[Advantage] | Advantage | Callable[..., Any]', **options: Any) -> Advantage:
    """Return an advantage for a name, plugin id, class, instance or plain function.

    Raises:
        UnknownComponent: the name is not registered.
        InvalidComponentOptions: an option is unknown, missing or invalid, or options are given for an instance or a
            function.
        PluginRefused, HubError: see `ComponentRegistry.build`.
    """
    if isinstance(advantage, str | type | Advantage):
        return ADVANTAGES.build(advantage, options)
    if options:
        raise InvalidComponentOptions('advantage', repr(advantage), 'a function takes no options')
    return _FunctionAdvantage(advantage)
