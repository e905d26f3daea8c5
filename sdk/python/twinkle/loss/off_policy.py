"""Corrections for samples from an engine other than the trainer.

Two engines compute slightly different probabilities from the same weights, and very different ones from older
weights. The importance weight of a token is `k = p_old / p_sampler`: the trainer's probability before the update
divided by that of the engine that sampled the token. Legend: R is the number of labels.
"""

from typing import Literal, TypedDict, get_args

import torch
from torch import Tensor

from twinkle.loss.options import check_choice, check_number

Correction = Literal['none', 'truncated', 'masked']
"""Use of k: 'none', 'truncated' (the minimum of k and a bound) or 'masked' (k within bounds, else 0)."""


class CorrectionOptions(TypedDict, total=False):
    """Options of the policy losses that accept a `correction`."""

    correction: Correction
    """'none' by default; the other corrections need the stream `sampler_logps`."""
    correction_low: float
    """Minimum k of 'masked'; smaller weights become 0. 0.5 by default."""
    correction_high: float
    """Maximum k. 'truncated' clips larger weights (default 2), and 'masked' sets them to 0 (default 5)."""


def truncated_weights(log_k_R: Tensor, *, high: float = 2.0) -> Tensor:
    """Return [R], `min(k, high)` without gradient.

    Truncated importance sampling: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training". Ionides 2008 introduced the truncation, which bounds the variance.
    """
    return log_k_R.detach().exp().clamp(max=high)


def masked_weights(log_k_R: Tensor, *, low: float = 0.5, high: float = 5.0) -> Tensor:
    """Return [R], k where `low <= k <= high`, else 0, without gradient.

    IcePop: Ling Team 2025, "Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model",
    arXiv 2510.18855; the defaults are the paper's bounds.
    """
    k_R = log_k_R.detach().exp()
    return torch.where((k_R >= low) & (k_R <= high), k_R, torch.zeros_like(k_R))


class OffPolicyCorrection:
    """Correction by importance weights, with its bounds.

    Args:
        options: see `CorrectionOptions`.

    Raises:
        ValueError: an option is unknown, out of range, or not used by the correction.
    """

    def __init__(self, options: CorrectionOptions) -> None:
        unknown = sorted(set(options) - set(CorrectionOptions.__annotations__))
        if unknown:
            raise ValueError(f'unknown options {unknown}; corrections have {[*CorrectionOptions.__annotations__]}')
        kind = check_choice('correction', options.get('correction', 'none'), get_args(Correction))
        unused = {'none': ('correction_low', 'correction_high'), 'truncated': ('correction_low',), 'masked': ()}[kind]
        for name in unused:
            if name in options:
                raise ValueError(
                    f"{name} has no effect with correction '{kind}'; remove {name} or choose another correction"
                )
        self.kind = kind
        self.low = check_number('correction_low', options.get('correction_low', 0.5), low=0.0)
        default = 5.0 if kind == 'masked' else 2.0
        lowest = self.low if kind == 'masked' else 0.0
        high = options.get('correction_high', default)
        self.high = check_number('correction_high', high, low=lowest, is_low_allowed=False)

    def weights(self, log_k_R: Tensor) -> Tensor:
        """Return [R], the factor of each label's surrogate, without gradient. `kind` must not be 'none'."""
        if self.kind == 'truncated':
            return truncated_weights(log_k_R, high=self.high)
        return masked_weights(log_k_R, low=self.low, high=self.high)

    def is_bounded(self, log_k_R: Tensor) -> Tensor:
        """Return bool [R], true where the weight differs from k. `kind` must not be 'none'."""
        k_R = log_k_R.detach().exp()
        return (k_R > self.high) | ((k_R < self.low) if self.kind == 'masked' else torch.zeros_like(k_R).bool())
