"""Corrections for sampling with another engine than the one that trains.

Even with the same weights both engines give a token other probabilities, and with older weights all the more. The
weight of a token is `k = p_old / p_sampler`: the trainer's probability of it before the update over that of the
engine that drew it. Legend: R labels.
"""

from typing import Literal, TypedDict, get_args

import torch
from torch import Tensor

from twinkle.loss.options import check_choice, check_number

Correction = Literal['none', 'truncated', 'masked']
"""What becomes of k: nothing, the smaller of it and a bound, or itself within bounds and else 0."""


class CorrectionOptions(TypedDict, total=False):
    """Options that every policy loss with a ratio takes."""

    correction: Correction
    """Unset: 'none'. Any other needs the stream `sampler_logps`."""
    correction_low: float
    """Of 'masked': the smallest k that counts. Unset: 0.5."""
    correction_high: float
    """The largest k: 'truncated' bounds it, 'masked' drops what is above. Unset: 2 and 5."""


def truncated_weights(log_k_R: Tensor, *, high: float = 2.0) -> Tensor:
    """Return [R]: `min(k, high)`, without gradient.

    Truncated importance sampling: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training"; truncation of weights for a bounded variance is Ionides 2008.
    """
    return log_k_R.detach().exp().clamp(max=high)


def masked_weights(log_k_R: Tensor, *, low: float = 0.5, high: float = 5.0) -> Tensor:
    """Return [R]: k where `low <= k <= high`, else 0, without gradient.

    IcePop: Ling Team 2025, "Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model",
    arXiv 2510.18855, whose bounds are the defaults.
    """
    k_R = log_k_R.detach().exp()
    return torch.where((k_R >= low) & (k_R <= high), k_R, torch.zeros_like(k_R))


class OffPolicyCorrection:
    """One of the corrections with its bounds.

    Args:
        options: see `CorrectionOptions`.

    Raises:
        ValueError: an option is unknown, out of its range, or of no use to the correction.
    """

    def __init__(self, options: CorrectionOptions) -> None:
        unknown = sorted(set(options) - set(CorrectionOptions.__annotations__))
        if unknown:
            raise ValueError(
                f'unknown options {unknown}; of corrections there are {[*CorrectionOptions.__annotations__]}'
            )
        kind = check_choice('correction', options.get('correction', 'none'), get_args(Correction))
        idle = {'none': ('correction_low', 'correction_high'), 'truncated': ('correction_low',), 'masked': ()}[kind]
        for name in idle:
            if name in options:
                raise ValueError(f"{name} says nothing with correction '{kind}'; leave it out or choose another")
        self.kind = kind
        self.low = check_number('correction_low', options.get('correction_low', 0.5), low=0.0)
        usual = 5.0 if kind == 'masked' else 2.0
        least = self.low if kind == 'masked' else 0.0
        high = options.get('correction_high', usual)
        self.high = check_number('correction_high', high, low=least, is_low_allowed=False)

    def weights(self, log_k_R: Tensor) -> Tensor:
        """Return [R]: the factor of each label's surrogate, without gradient."""
        if self.kind == 'truncated':
            return truncated_weights(log_k_R, high=self.high)
        return masked_weights(log_k_R, low=self.low, high=self.high)

    def is_bounded(self, log_k_R: Tensor) -> Tensor:
        """Return bool [R]: where the correction is not k itself."""
        k_R = log_k_R.detach().exp()
        return (k_R > self.high) | ((k_R < self.low) if self.kind == 'masked' else torch.zeros_like(k_R).bool())
