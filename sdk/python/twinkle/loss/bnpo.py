"""Clipped objective averaged over the labels of a batch."""

from twinkle.loss.policy import ClippedPolicyLoss


class BNPOLoss(ClippedPolicyLoss):
    """Clipped objective, averaged over all labels.

    Other libraries use this name for the token-level mean of DAPO (arXiv 2503.14476, equation 12) over the
    labels of a step. BNPO (arXiv 2506.02864) is named after a Beta normalization of the rewards. This loss does not
    normalize rewards; the caller can normalize them.

    The divisor of the loss (`LossOutput.num_tokens`) is the number of labels. For arguments, streams and metrics see
    `ClippedPolicyLoss` and `PolicyLoss`.
    """

    aggregation = 'token-mean'
