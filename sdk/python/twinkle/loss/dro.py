"""Direct Reward Optimisation."""

from torch import Tensor

from twinkle.data_format import IGNORE_INDEX
from twinkle.loss.base import LossBatch
from twinkle.loss.options import check_choice, check_number
from twinkle.loss.policy import AGGREGATIONS, PolicyLoss


class DROLoss(PolicyLoss):
    """Loss `- (A log p - beta / 2 (log p - old_logps)^2)` per label.

    The quadratic term keeps the policy close to the policy that sampled the tokens. No probability ratio is used. The
    loss is that of arXiv 2405.19107, section 3, in the form per label of Kimi k1.5, arXiv 2501.12599, equation 3. The
    advantage A of the first paper is the reward minus the value of the prompt.

    The divisor of the loss (`LossOutput.num_tokens`) is the number of labels if `loss_agg_mode` is 'token-mean',
    otherwise the number of sequences. The streams `advantages` and `old_logps` are required. For metrics see
    `PolicyLoss`.

    Args:
        beta: factor of the quadratic term, at least 0.
        loss_agg_mode: see `PPOLoss`.
        entropy_coef: see `PolicyLoss`.
        ignore_index: label value to ignore, in addition to -100.

    Raises:
        ValueError: an option is invalid.
    """

    def __init__(
        self,
        beta: float = 0.05,
        loss_agg_mode: str = 'token-mean',
        entropy_coef: float = 0.0,
        ignore_index: int = IGNORE_INDEX,
    ) -> None:
        super().__init__(entropy_coef=entropy_coef, ignore_index=ignore_index)
        self.square_coef = check_number('beta', beta, low=0.0)
        self.aggregation = check_choice('loss_agg_mode', loss_agg_mode, AGGREGATIONS)
        self.required_streams = ('advantages', 'old_logps')
        self.optional_streams = ()

    def surrogate(self, ratio_R: Tensor, batch: LossBatch) -> Tensor:
        """Return [R], the negated objective."""
        del ratio_R
        square_R = (batch.logps_R - batch.stream('old_logps')).square()
        return 0.5 * self.square_coef * square_R - batch.stream('advantages') * batch.logps_R
