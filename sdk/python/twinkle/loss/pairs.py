"""Base of preference losses, and functions that they share.

Features come in pairs: the chosen response at an even index, followed by the rejected response.
Legend: R labels, S features, P pairs.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from twinkle.data_format import IGNORE_INDEX, LossOutput
from twinkle.loss.base import Loss, LossBatch
from twinkle.loss.errors import InvalidLossInput
from twinkle.loss.options import check_whole
from twinkle.loss.reporting import as_numbers, mean_of


def check_pairs(batch: LossBatch) -> None:
    """Check that both features of every pair have counted labels.

    Raises:
        InvalidLossInput: a feature has no counted label; the error names the first such feature.
    """
    indexes = batch.sequences.tolist()
    partners = {index ^ 1 for index in indexes} - set(indexes)
    if partners:
        raise InvalidLossInput(
            'has no counted label, but is part of a pair; alternate chosen and rejected, both with labels',
            index=min(partners),
        )


def chosen_and_rejected(values_S: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values of the chosen and of the rejected responses, [P] each."""
    return values_S[0::2], values_S[1::2]


class PairLoss(Loss):
    """Base class of preference losses.

    The log-probability of a response is the weighted sum of the log-probabilities of its labels, and its length is the
    number of its labels. Both responses of a pair need labels. The divisor of the loss (`LossOutput.num_tokens`) is the
    number of pairs.

    The metrics are means over pairs: `chosen_reward` and `rejected_reward` (in nats, scaled as the loss defines),
    `reward_margin` (their difference) and `reward_accuracy` (the fraction of pairs with a positive margin).
    """

    group_size = 2

    def __init__(self, ignore_index: int = IGNORE_INDEX) -> None:
        self.ignore_index = check_whole('ignore_index', ignore_index)

    def response_logps(self, batch: LossBatch, logps_R: Tensor, *, is_mean: bool = False) -> tuple[Tensor, Tensor]:
        """Return weighted sums, or means, of the chosen and the rejected responses' log-probabilities, [P] each."""
        reduce = batch.feature_mean if is_mean else batch.feature_sum
        return chosen_and_rejected(reduce(batch.weights_R * logps_R))

    def outcome(
        self, losses_P: Tensor, rewards: tuple[Tensor, Tensor], others: Mapping[str, Tensor] | None = None
    ) -> LossOutput:
        """Return the sum over pairs with the metrics.

        Args:
            losses_P: one loss per pair.
            rewards: rewards of the chosen and of the rejected responses, [P] each.
            others: additional scalar metrics.
        """
        chosen_P, rejected_P = rewards
        reported = {
            'chosen_reward': mean_of(chosen_P),
            'rejected_reward': mean_of(rejected_P),
            'reward_margin': mean_of(chosen_P - rejected_P),
            'reward_accuracy': mean_of(chosen_P > rejected_P),
            **(others or {}),
        }
        count = len(losses_P)
        return LossOutput(
            loss=losses_P.sum(), num_tokens=count, metrics=as_numbers(reported), metric_weight=float(count)
        )


def preference_nll(margins_P: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Return [P], `-log sigmoid(margin)`; a fraction `label_smoothing` of the pairs counts with the opposite margin."""
    if not label_smoothing:
        return -logsigmoid(margins_P)
    return -(1.0 - label_smoothing) * logsigmoid(margins_P) - label_smoothing * logsigmoid(-margins_P)


def log1mexp(values: Tensor) -> Tensor:
    """Return `log(1 - exp(value))`, accurate for values up to -1e-7; larger values are clamped to -1e-7."""
    bounded = values.clamp(max=-1e-7)
    return torch.where(bounded > -0.6931472, (-torch.expm1(bounded)).log(), torch.log1p(-bounded.exp()))
