"""Base of policy-gradient losses: ratio to the sampling policy, penalties, aggregation.

Legend: R labels, S features with labels (one sampled sequence each).
"""

from abc import abstractmethod
from typing import Unpack

import torch
from torch import Tensor

from twinkle.data_format import IGNORE_INDEX, LossOutput
from twinkle.loss.base import Loss, LossBatch
from twinkle.loss.off_policy import CorrectionOptions, OffPolicyCorrection
from twinkle.loss.options import check_number, check_whole
from twinkle.loss.reporting import as_numbers, mean_of

AGGREGATIONS = ('token-mean', 'seq-mean-token-mean', 'seq-mean-token-sum')
"""Reductions of label losses, in this order: the mean over all labels; the mean over each sequence and then over
sequences; the sum over each sequence and then the mean over sequences."""

LOG_RATIO_LIMIT = 20.0
"""Limit of the magnitude of log ratios, beyond which the gradient is 0. float32 overflows at e^89, and a single
infinite ratio would make the loss of the batch infinite."""


def aggregate(batch: LossBatch, loss_R: Tensor, mode: str) -> tuple[Tensor, int]:
    """Return the sum of the losses and its divisor, for one of `AGGREGATIONS`."""
    if mode == 'token-mean':
        return loss_R.sum(), batch.label_count
    reduce = batch.feature_mean if mode == 'seq-mean-token-mean' else batch.feature_sum
    return reduce(loss_R).sum(), batch.sequence_count


def log_ratio(batch: LossBatch) -> Tensor:
    """Return [R], `log p(label) - old_logps`, clamped to `LOG_RATIO_LIMIT` in magnitude.

    Without the stream `old_logps`, the value is 0 with the gradient of `log p`.
    """
    old_R = batch.streams.get('old_logps')
    difference_R = batch.logps_R - (batch.logps_R.detach() if old_R is None else old_R)
    return difference_R.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def sampler_log_ratio(batch: LossBatch) -> Tensor:
    """Return [R], `old_logps - sampler_logps` without gradient, clamped to `LOG_RATIO_LIMIT` in magnitude.

    Without the stream `old_logps`, `log p(label)` is used instead.
    """
    old_R = batch.streams.get('old_logps')
    trainer_R = batch.logps_R.detach() if old_R is None else old_R
    return (trainer_R - batch.stream('sampler_logps')).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


class PolicyLoss(Loss):
    """Base class of losses with a ratio `r = p / p_old` and an advantage A per label.

    A label's loss is `surrogate(r, A) + beta * kl - entropy_coef * H`, times its weight. `kl` is the unbiased, positive
    estimator `q/p - log(q/p) - 1` with the reference's probability q (DeepSeekMath, arXiv 2402.03300, equation 4). H is
    the entropy of the distribution that predicts the label.

    The stream `advantages` is required; a positive advantage makes a token more likely. `ref_logps` is required if beta
    is not 0. Without `old_logps`, the batch is treated as sampled from the current policy, with r = 1.

    A `correction` multiplies the surrogate by a weight computed from `k = p_old / p_sampler`, with p_sampler from the
    stream `sampler_logps`; without `old_logps`, p_old is p without gradient. See `twinkle.loss.off_policy`.

    The metrics are means over the labels:

    - `ratio`: r.
    - `approx_kl`: `r - 1 - log r`, in nats; the distance from the sampling policy.
    - `clip_fraction`, if the loss clips: fraction of labels whose gradient was clipped.
    - `ref_kl`, if beta is not 0: kl, in nats.
    - `entropy`, if its coefficient is not 0: H, in nats.
    - `sampler_ratio`, with a correction: k.
    - `sampler_kl`, with a correction: `k - 1 - log k`, in nats; the distance of the trainer from the sampler.
    - `corrected_fraction`, with a correction: fraction of labels whose weight differs from k.

    Args:
        beta: factor of the divergence from the reference, at least 0.
        entropy_coef: factor of the entropy, at least 0.
        ignore_index: label value to ignore, in addition to -100.
        correction: see `CorrectionOptions`.

    Raises:
        ValueError: an option is unknown or invalid.
    """

    aggregation = 'seq-mean-token-mean'
    """Reduction, one of `AGGREGATIONS`."""

    def __init__(
        self,
        *,
        beta: float = 0.0,
        entropy_coef: float = 0.0,
        ignore_index: int = IGNORE_INDEX,
        **correction: Unpack[CorrectionOptions],
    ) -> None:
        self.ignore_index = check_whole('ignore_index', ignore_index)
        self.beta = check_number('beta', beta, low=0.0)
        self.entropy_coef = check_number('entropy_coef', entropy_coef, low=0.0)
        self.correction = OffPolicyCorrection(correction)
        self.required_streams = ('advantages', 'ref_logps') if self.beta else ('advantages',)
        if self.correction.kind != 'none':
            self.required_streams = (*self.required_streams, 'sampler_logps')
        self.optional_streams = ('old_logps',)
        self.required_outputs = ('entropies',) if self.entropy_coef else ()

    def log_ratio(self, batch: LossBatch) -> Tensor:
        """Return [R], the logarithm of the ratio."""
        if 'old_logps' in self.required_streams:
            batch.stream('old_logps')
        return log_ratio(batch)

    @abstractmethod
    def surrogate(self, ratio_R: Tensor, batch: LossBatch) -> Tensor:
        """Return [R], the loss of each label before penalties and weights."""

    def is_clipped(self, ratio_R: Tensor, batch: LossBatch) -> Tensor | None:
        """Return bool [R], true where the gradient was clipped, or None if the loss does not clip."""
        del ratio_R, batch
        return None

    def aggregate(self, batch: LossBatch, loss_R: Tensor) -> tuple[Tensor, int]:
        """Return the sum of the losses and its divisor."""
        return aggregate(batch, loss_R, self.aggregation)

    def __call__(self, batch: LossBatch) -> LossOutput:
        """Return the aggregated loss as a sum and its divisor, with the metrics."""
        log_ratio_R = self.log_ratio(batch)
        ratio_R = log_ratio_R.exp()
        loss_R = self.surrogate(ratio_R, batch)
        reported = {'ratio': mean_of(ratio_R), 'approx_kl': mean_of(ratio_R - 1.0 - log_ratio_R)}
        if self.correction.kind != 'none':
            log_k_R = sampler_log_ratio(batch)
            loss_R = self.correction.weights(log_k_R) * loss_R
            reported['sampler_ratio'] = mean_of(log_k_R.exp())
            reported['sampler_kl'] = mean_of(torch.expm1(log_k_R) - log_k_R)
            reported['corrected_fraction'] = mean_of(self.correction.is_bounded(log_k_R))
        clipped_R = self.is_clipped(ratio_R.detach(), batch)
        if clipped_R is not None:
            reported['clip_fraction'] = mean_of(clipped_R)
        if self.beta:
            log_odds_R = batch.stream('ref_logps') - batch.logps_R
            kl_R = torch.expm1(log_odds_R) - log_odds_R
            loss_R = loss_R + self.beta * kl_R
            reported['ref_kl'] = mean_of(kl_R)
        if self.entropy_coef:
            loss_R = loss_R - self.entropy_coef * batch.output('entropies')
            reported['entropy'] = mean_of(batch.output('entropies'))
        loss, divisor = self.aggregate(batch, batch.weights_R * loss_R)
        return LossOutput(
            loss=loss, num_tokens=divisor, metrics=as_numbers(reported), metric_weight=float(batch.label_count)
        )


class ClippedPolicyLoss(PolicyLoss):
    """`- min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A)`: PPO, arXiv 1707.06347, equation 7.

    Args:
        epsilon: lower bound of r is `1 - epsilon`, effective for negative advantages; above 0.
        epsilon_high: upper bound of r is `1 + epsilon_high`, effective for positive advantages; `epsilon` if
            unset. A value above `epsilon` is clip-higher of DAPO, arXiv 2503.14476, equation 10.
        beta: see `PolicyLoss`.
        entropy_coef: see `PolicyLoss`.
        ignore_index: label value to ignore, in addition to -100.
        correction: see `PolicyLoss`.

    Raises:
        ValueError: an option is unknown or invalid.
    """

    def __init__(
        self,
        epsilon: float = 0.2,
        epsilon_high: float | None = None,
        beta: float = 0.0,
        entropy_coef: float = 0.0,
        ignore_index: int = IGNORE_INDEX,
        **correction: Unpack[CorrectionOptions],
    ) -> None:
        super().__init__(beta=beta, entropy_coef=entropy_coef, ignore_index=ignore_index, **correction)
        self.epsilon = check_number('epsilon', epsilon, low=0.0, is_low_allowed=False)
        high = epsilon if epsilon_high is None else epsilon_high
        self.epsilon_high = check_number('epsilon_high', high, low=0.0, is_low_allowed=False)

    def surrogate(self, ratio_R: Tensor, batch: LossBatch) -> Tensor:
        """Return [R], the smaller of both objectives, negated."""
        advantages_R = batch.stream('advantages')
        clipped_R = ratio_R.clamp(1.0 - self.epsilon, 1.0 + self.epsilon_high)
        return -torch.minimum(ratio_R * advantages_R, clipped_R * advantages_R)

    def is_clipped(self, ratio_R: Tensor, batch: LossBatch) -> Tensor:
        """Return bool [R], true where the clipped objective is smaller, so that the label has no gradient."""
        advantages_R = batch.stream('advantages')
        is_high = (advantages_R > 0) & (ratio_R > 1.0 + self.epsilon_high)
        return is_high | ((advantages_R < 0) & (ratio_R < 1.0 - self.epsilon))
