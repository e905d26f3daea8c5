"""Losses of the Tinker API, with Tinker's names, formulas, options and defaults.

Each loss is a sum over tokens, without a divisor, and has the metric `loss:sum`. Tinker's `weights` are `loss_weights`
here, its `logprobs` are `old_logps`, and its `target_tokens` of shape [T, K] and their `weights` are the streams
`target_ids` and `target_weights`. Tinker does not publish the objective of `stable_reinforce`; the module defines one.
"""

from twinkle.loss.tinker.base import TinkerLoss
from twinkle.loss.tinker.cispo import TinkerCISPO
from twinkle.loss.tinker.cross_entropy import TinkerCrossEntropy
from twinkle.loss.tinker.dro import TinkerDRO
from twinkle.loss.tinker.gspo import TinkerGSPO
from twinkle.loss.tinker.importance_sampling import TinkerImportanceSampling
from twinkle.loss.tinker.ppo import TinkerPPO
from twinkle.loss.tinker.stable_reinforce import TinkerStableReinforce

TINKER_LOSSES: dict[str, type[TinkerLoss]] = {
    'cispo': TinkerCISPO,
    'cross_entropy': TinkerCrossEntropy,
    'dro': TinkerDRO,
    'gspo': TinkerGSPO,
    'importance_sampling': TinkerImportanceSampling,
    'ppo': TinkerPPO,
    'stable_reinforce': TinkerStableReinforce,
}
"""Loss classes by the names in Tinker's API."""

__all__ = [
    'TINKER_LOSSES',
    'TinkerCISPO',
    'TinkerCrossEntropy',
    'TinkerDRO',
    'TinkerGSPO',
    'TinkerImportanceSampling',
    'TinkerLoss',
    'TinkerPPO',
    'TinkerStableReinforce',
]
