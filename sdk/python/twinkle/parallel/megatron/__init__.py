"""Models whose layers are divided among ranks by Megatron-core. Requires the extra `megatron`."""

from twinkle.parallel.megatron.causal_lm import MegatronCausalLM
from twinkle.parallel.megatron.ranks import MegatronRanks

__all__ = ['MegatronCausalLM', 'MegatronRanks']
