"""Group Relative Policy Optimization."""

from twinkle.loss.policy import ClippedPolicyLoss


class GRPOLoss(ClippedPolicyLoss):
    """The clipped objective, averaged over each sequence's labels, then over sequences.

    DeepSeekMath, arXiv 2402.03300, equation 3; the advantages, relative to their group, come with the
    features, see `twinkle.advantage.GRPOAdvantage`.

    `num_tokens`: the sequences. Arguments, streams and reports: see `ClippedPolicyLoss`, `PolicyLoss`.
    """

    aggregation = 'seq-mean-token-mean'
