"""Names and shapes of the weights of a supported model, and their division among pipeline stages."""

import re

from transformers import PreTrainedConfig

from twinkle.parallel.megatron.configuration import head_size_of, is_mixture

ATTENTION_LAYERS = ('self_attn.q_proj', 'self_attn.k_proj', 'self_attn.v_proj', 'self_attn.o_proj')
"""Linear layers of an attention layer, in transformers' order."""
MLP_LAYERS = ('mlp.gate_proj', 'mlp.up_proj', 'mlp.down_proj')
"""Linear layers of a gated layer without experts, in transformers' order."""
EMBEDDING, HEAD = 'model.embed_tokens.weight', 'lm_head'
_EXPERTS = 'mlp.experts'
_KNOWN_WEIGHTS = re.compile(
    r'(model\.layers\.\d+\.('
    r'(input_layernorm|post_attention_layernorm|self_attn\.[qk]_norm)\.weight|'
    rf'({"|".join(map(re.escape, (*ATTENTION_LAYERS, *MLP_LAYERS)))})\.(weight|bias)|'
    r'mlp\.gate\.weight|mlp\.experts\.\d+\.(gate|up|down)_proj\.weight)|'
    r'model\.(embed_tokens|norm)\.weight|lm_head\.weight)'
)


def is_known_weight(name: str) -> bool:
    """Return whether the backend supports a weight of a model folder."""
    return _KNOWN_WEIGHTS.fullmatch(name) is not None


def linear_shapes(config: PreTrainedConfig) -> dict[str, tuple[int, int]]:
    """Return the input and output sizes of all linear layers except the head, by path, in transformers' order."""
    hidden, inner, head_size = config.hidden_size, config.intermediate_size, head_size_of(config)
    queries, keys = config.num_attention_heads * head_size, config.num_key_value_heads * head_size
    attention = dict(
        zip(ATTENTION_LAYERS, ((hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)), strict=True)
    )
    mlp = dict(zip(MLP_LAYERS, ((hidden, inner), (hidden, inner), (inner, hidden)), strict=True))
    return {
        f'model.layers.{index}.{name}': shape
        for index in range(config.num_hidden_layers)
        for name, shape in (attention if is_mixture(config, index) else {**attention, **mlp}).items()
    }


def expert_shapes(config: PreTrainedConfig) -> dict[str, tuple[int, int, int]]:
    """Return `(experts, in_features, out_features)` of the stacked weights of all experts, by path."""
    shapes: dict[str, tuple[int, int, int]] = {}
    for index in range(config.num_hidden_layers):
        if is_mixture(config, index):
            path, inner = f'model.layers.{index}.{_EXPERTS}', config.moe_intermediate_size
            shapes[f'{path}.gate_up_proj'] = (config.num_experts, config.hidden_size, 2 * inner)
            shapes[f'{path}.down_proj'] = (config.num_experts, inner, config.hidden_size)
    return shapes


def padded_vocabulary(size: int, rank_count: int) -> int:
    """Return the number of token ids, padded so that all `tp` ranks have the same number of token ids."""
    return -(-size // rank_count) * rank_count


def stage_layers(layer_count: int, stage: int, stage_count: int) -> range:
    """Return the layer indices of a pipeline stage. If stages are uneven, the first ones have one more layer each."""
    size, more = divmod(layer_count, stage_count)
    begin = stage * size + min(stage, more)
    return range(begin, begin + size + (stage < more))
