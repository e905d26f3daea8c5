"""The clipped objective with every label of a batch in equal weight."""

from twinkle.loss.policy import ClippedPolicyLoss


class BNPOLoss(ClippedPolicyLoss):
    """The clipped objective, averaged over all labels.

    What the field's trainers call by this name: the token-level mean of DAPO, arXiv 2503.14476, equation 12,
    over the labels of a step. The normalisation of rewards by a Beta distribution, which gave BNPO its name
    (arXiv 2506.02864), is part of the advantages and so the caller's.

    `num_tokens`: the labels. Arguments, streams and reports: see `ClippedPolicyLoss`, `PolicyLoss`.
    """

    aggregation = 'token-mean'
