"""Losses by name."""

from collections.abc import Callable
from typing import Any

from twinkle.component import ComponentRegistry, InvalidComponentOptions
from twinkle.data_format import LossOutput
from twinkle.loss.base import Loss, LossBatch
from twinkle.loss.cross_entropy import CrossEntropyLoss

LossFunction = Callable[[LossBatch], LossOutput]

LOSSES = ComponentRegistry('loss', Loss, (CrossEntropyLoss,))
"""Losses by name."""


class _FunctionLoss(Loss):
    """A plain function as a loss; nothing is known of it, so it is never run in parts."""

    is_separable = False

    def __init__(self, function: LossFunction) -> None:
        self._function = function

    def __call__(self, batch: LossBatch) -> LossOutput:
        """Return what the function returns."""
        return self._function(batch)


def build_loss(loss: 'str | type[Loss] | Loss | LossFunction', **options: Any) -> Loss:
    """Return a loss given by name, class, instance or plain function.

    Raises:
        UnknownComponent: the name is not registered.
        InvalidComponentOptions: an option is unknown or refused.
    """
    if isinstance(loss, str | type | Loss):
        return LOSSES.build(loss, options)
    if options:
        raise InvalidComponentOptions('loss', repr(loss), 'a function takes no options')
    return _FunctionLoss(loss)
