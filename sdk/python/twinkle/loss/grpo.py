"""Group Relative Policy Optimization."""

from twinkle.loss.policy import ClippedPolicyLoss


class GRPOLoss(ClippedPolicyLoss):
    """Clipped objective, averaged over each sequence's labels and then over sequences.

    DeepSeekMath, arXiv 2402.03300, equation 3. The group-relative advantages are a stream of the features; see
    `twinkle.advantage.GRPOAdvantage`.

    The divisor of the loss (`LossOutput.num_tokens`) is the number of sequences. For arguments, streams and metrics see
    `ClippedPolicyLoss` and `PolicyLoss`.
    """

    aggregation = 'seq-mean-token-mean'
