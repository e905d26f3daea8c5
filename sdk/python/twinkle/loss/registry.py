"""Registry of losses."""

from collections.abc import Callable
from typing import Any

from twinkle.component import ComponentRegistry, InvalidComponentOptions
from twinkle.data_format import STREAMS, LossOutput
from twinkle.loss.base import Loss, LossBatch
from twinkle.loss.bnpo import BNPOLoss
from twinkle.loss.cispo import CISPOLoss
from twinkle.loss.cpo import CPOLoss
from twinkle.loss.cross_entropy import CrossEntropyLoss
from twinkle.loss.dpo import DPOLoss
from twinkle.loss.dr_grpo import DRGRPOLoss
from twinkle.loss.dro import DROLoss
from twinkle.loss.gkd import GKDLoss
from twinkle.loss.grpo import GRPOLoss
from twinkle.loss.gspo import GSPOLoss
from twinkle.loss.importance_sampling import ImportanceSamplingLoss
from twinkle.loss.infonce import InfonceLoss
from twinkle.loss.mse import MSELoss
from twinkle.loss.orpo import ORPOLoss
from twinkle.loss.ppo import PPOLoss
from twinkle.loss.ppo_value import PPOValueLoss
from twinkle.loss.reinforce import ReinforceLoss
from twinkle.loss.sapo import SAPOLoss
from twinkle.loss.simpo import SimPOLoss
from twinkle.loss.soft_cross_entropy import SoftCrossEntropyLoss
from twinkle.loss.tinker import TINKER_LOSSES
from twinkle.loss.weighted_logps import WeightedLogpsLoss

LossFunction = Callable[[LossBatch], LossOutput]

PLUGIN_GROUP = 'twinkle.losses'
"""Entry-point group in which installed packages provide losses to `LOSSES.load_plugins`."""

LOSSES = ComponentRegistry(
    'loss',
    Loss,
    (
        BNPOLoss,
        CISPOLoss,
        CPOLoss,
        CrossEntropyLoss,
        DPOLoss,
        DRGRPOLoss,
        DROLoss,
        GKDLoss,
        GRPOLoss,
        GSPOLoss,
        ImportanceSamplingLoss,
        InfonceLoss,
        MSELoss,
        ORPOLoss,
        PPOLoss,
        PPOValueLoss,
        ReinforceLoss,
        SAPOLoss,
        SimPOLoss,
        SoftCrossEntropyLoss,
        WeightedLogpsLoss,
    ),
    named=TINKER_LOSSES,
    plugin_group=PLUGIN_GROUP,
)
"""Registered losses by name: the classes of this package, and Tinker's losses under the names in its API."""


class _FunctionLoss(Loss):
    """Loss that calls a plain function. The function may read every stream, and its batches are not split."""

    is_separable = False
    optional_streams = tuple(STREAMS)

    def __init__(self, function: LossFunction) -> None:
        self._function = function

    def __call__(self, batch: LossBatch) -> LossOutput:
        return self._function(batch)


def build_loss(loss: 'str | type[Loss] | Loss | LossFunction', **options: Any) -> Loss:
    """Return a loss for a name, plugin id, class, instance or plain function.

    Raises:
        UnknownComponent: the name is not registered.
        InvalidComponentOptions: an option is unknown, missing or invalid, or options are given for an instance or a
            function.
        PluginRefused, HubError: see `ComponentRegistry.build`.
    """
    if isinstance(loss, str | type | Loss):
        return LOSSES.build(loss, options)
    if options:
        raise InvalidComponentOptions('loss', repr(loss), 'a function takes no options')
    return _FunctionLoss(loss)
