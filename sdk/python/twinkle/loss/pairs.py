"""What the losses of preferences share.

Features come in pairs, the chosen one at an even index and the rejected one behind it.
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
    """Check that both features of every pair have labels.

    Raises:
        InvalidLossInput: names the first that has not.
    """
    indexes = batch.sequences.tolist()
    partners = {index ^ 1 for index in indexes} - set(indexes)
    if partners:
        raise InvalidLossInput(
            'has no label that counts, but is one of a pair: give chosen and rejected in turn, both with labels',
            index=min(partners),
        )


def chosen_and_rejected(values_S: Tensor) -> tuple[Tensor, Tensor]:
    """Return [P] and [P]."""
    return values_S[0::2], values_S[1::2]


class PairLoss(Loss):
    """Base of the losses of preferences.

    The log-probability of a response is the sum of its labels', each times its weight; lengths are
    numbers of labels. Every pair needs labels on both sides. `num_tokens`: the pairs.

    Reports means over pairs: `chosen_reward`, `rejected_reward` (in nats; the loss says how they are scaled),
    `reward_margin` (their difference), `reward_accuracy` (share of pairs with a positive one).
    """

    group_size = 2

    def __init__(self, ignore_index: int = IGNORE_INDEX) -> None:
        self.ignore_index = check_whole('ignore_index', ignore_index)

    def response_logps(self, batch: LossBatch, logps_R: Tensor, *, is_mean: bool = False) -> tuple[Tensor, Tensor]:
        """Return [P] and [P]: sums, or means, of weighted log-probabilities of chosen and rejected responses."""
        reduce = batch.feature_mean if is_mean else batch.feature_sum
        return chosen_and_rejected(reduce(batch.weights_R * logps_R))

    def outcome(
        self, losses_P: Tensor, rewards: tuple[Tensor, Tensor], others: Mapping[str, Tensor] | None = None
    ) -> LossOutput:
        """Return the sum over pairs with the reports.

        Args:
            losses_P: one loss a pair.
            rewards: of the chosen and the rejected responses, [P] each.
            others: further scalars to report.
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
    """Return [P]: `-log sigmoid(margin)`, with a share of the labels taken as flipped."""
    if not label_smoothing:
        return -logsigmoid(margins_P)
    return -(1.0 - label_smoothing) * logsigmoid(margins_P) - label_smoothing * logsigmoid(-margins_P)


def log1mexp(values: Tensor) -> Tensor:
    """Return `log(1 - exp(value))` for values below 0, exact at both ends; -1e-7 stands for what lies above."""
    bounded = values.clamp(max=-1e-7)
    return torch.where(bounded > -0.6931472, (-torch.expm1(bounded)).log(), torch.log1p(-bounded.exp()))
