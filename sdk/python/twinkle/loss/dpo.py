"""Direct Preference Optimization and losses derived from its margin."""

import torch
from torch import Tensor

from twinkle.data_format import IGNORE_INDEX, LossOutput
from twinkle.loss.base import LossBatch
from twinkle.loss.options import check_choice, check_flag, check_number
from twinkle.loss.pairs import PairLoss, check_pairs, preference_nll
from twinkle.loss.reporting import mean_of

LOSS_TYPES = ('sigmoid', 'hinge', 'ipo', 'kto_pair')


class DPOLoss(PairLoss):
    """Loss of `h = log-ratio(chosen) - log-ratio(rejected)`, where a response's log-ratio is `log p - ref_logps`.

    - 'sigmoid': `-log sigmoid(beta h)`, DPO, arXiv 2305.18290, equation 7. With `label_smoothing` e, the loss
      is `-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)`, as if in a fraction e of the pairs the chosen and
      the rejected response were exchanged (arXiv 2403.00409, section 3).
    - 'hinge': `max(0, 1 - beta h)`, hinge-norm of RSO, arXiv 2309.06657.
    - 'ipo': `(h - 1 / (2 beta))^2`, IPO, arXiv 2310.12036, equation 17; beta is the paper's tau.
    - 'kto_pair': half the sum of `1 - sigmoid(beta (log-ratio(chosen) - z_rejected))` and `1 - sigmoid(beta (z_chosen -
      log-ratio(rejected)))`. This is KTO, arXiv 2402.01306, equation 7, applied to pairs. z_chosen and z_rejected are
      the mean log-ratios of the chosen and the rejected responses in the batch, at least 0 and without gradient. The
      batch therefore cannot run in parts.

    `sft_weight` is the factor of an additional term, the chosen response's negative log-probability per label (arXiv
    2404.19733, equation 1). Without this term, the chosen response may become less likely together with the rejected
    response.

    The stream `ref_logps` is required unless `reference_free` is set. The divisor of the loss (`LossOutput.num_tokens`)
    is the number of pairs. For metrics see `PairLoss`; rewards are beta times the log-ratio. `sft_loss` is the negative
    log-probability of the additional term, in nats, if the term is used.

    Args:
        beta: scale of the log-ratios, above 0.
        label_smoothing: in [0, 0.5); only for 'sigmoid'.
        ignore_index: label value to ignore, in addition to -100.
        loss_type: one of the types above.
        reference_free: whether to use 0 as the reference's log-probabilities.
        sft_weight: factor of the additional term, at least 0.

    Raises:
        ValueError: an option is out of range, or does not apply to the type.
    """

    def __init__(
        self,
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        ignore_index: int = IGNORE_INDEX,
        loss_type: str = 'sigmoid',
        *,
        reference_free: bool = False,
        sft_weight: float = 0.0,
    ) -> None:
        super().__init__(ignore_index)
        self.beta = check_number('beta', beta, low=0.0, is_low_allowed=False)
        self.label_smoothing = check_number('label_smoothing', label_smoothing, low=0.0, high=0.499999)
        self.loss_type = check_choice('loss_type', loss_type, LOSS_TYPES)
        self.reference_free = check_flag('reference_free', reference_free)
        self.sft_weight = check_number('sft_weight', sft_weight, low=0.0)
        if label_smoothing and loss_type != 'sigmoid':
            raise ValueError(f"label_smoothing only applies to loss_type 'sigmoid', got {loss_type!r}")
        self.required_streams = () if reference_free else ('ref_logps',)
        self.is_separable = loss_type != 'kto_pair'

    def __call__(self, batch: LossBatch) -> LossOutput:
        """Return the sum over pairs.

        Raises:
            InvalidLossInput: a response of a pair has no labels.
        """
        check_pairs(batch)
        log_ratios_R = batch.logps_R if self.reference_free else batch.logps_R - batch.stream('ref_logps')
        chosen_P, rejected_P = self.response_logps(batch, log_ratios_R)
        losses_P = self._losses(chosen_P, rejected_P)
        others: dict[str, Tensor] = {}
        if self.sft_weight:
            nll_P = -self.response_logps(batch, batch.logps_R, is_mean=True)[0]
            losses_P = losses_P + self.sft_weight * nll_P
            others['sft_loss'] = mean_of(nll_P)
        return self.outcome(losses_P, (self.beta * chosen_P, self.beta * rejected_P), others)

    def _losses(self, chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
        margin_P = chosen_P - rejected_P
        match self.loss_type:
            case 'sigmoid':
                return preference_nll(self.beta * margin_P, label_smoothing=self.label_smoothing)
            case 'hinge':
                return (1.0 - self.beta * margin_P).relu()
            case 'ipo':
                return (margin_P - 0.5 / self.beta).square()
        chosen_gain_P = torch.sigmoid(self.beta * (chosen_P - _divergence(rejected_P)))
        rejected_gain_P = torch.sigmoid(self.beta * (_divergence(chosen_P) - rejected_P))
        return 1.0 - 0.5 * (chosen_gain_P + rejected_gain_P)


def _divergence(log_ratios_P: Tensor) -> Tensor:
    return (log_ratios_P.detach().sum() / max(len(log_ratios_P), 1)).clamp(min=0.0)
