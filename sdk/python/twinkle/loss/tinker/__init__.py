"""The losses of the Tinker API under its names, with exactly its formulas, options and defaults.

All are sums over tokens that nothing divides, reported as `loss:sum`. What Tinker calls `weights` are
`loss_weights` here, its `logprobs` `old_logps`, its `target_tokens` of shape [T, K] the stream `target_ids`. The
objective of `stable_reinforce` is not published: ours is stated there.
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
"""By the names Tinker's clients send."""

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
