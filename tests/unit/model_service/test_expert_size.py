"""The size of expert factors is limited, because each expert has factors of this rank."""

import pytest

from twinkle.data_format import LoraConfig
from twinkle.nn.targets import TargetLayers
from twinkle_services.kit.errors import InvalidField
from twinkle_services.model.backends.refusals import check_expert_size

LAYERS = TargetLayers(
    {'model.layers.0.self_attn.q_proj': (2048, 4096)},
    head='lm_head',
    shape=(2048, 151936),
    experts={f'model.layers.{layer}.mlp.experts.down_proj': (128, 768, 2048) for layer in range(48)},
)


@pytest.mark.parametrize(
    ('config', 'is_allowed'),
    [
        (LoraConfig(r=256, target_modules='all-linear'), True),
        (LoraConfig(r=32, target_modules='all-experts'), True),
        (LoraConfig(r=128, target_modules=['all-linear', 'experts.down_proj']), False),
        (LoraConfig(r=8, target_modules='all-experts', rank_pattern={'experts.down_proj': 256}), False),
    ],
    ids=['linear layers', 'small', 'large', 'large by pattern'],
)
def test_size_counts_every_expert(config: LoraConfig, *, is_allowed: bool) -> None:
    """The rank of experts is limited, even if a pattern sets it; the rank of linear layers is not limited here."""
    if is_allowed:
        check_expert_size(LAYERS, config)
        return
    with pytest.raises(InvalidField, match='lora_rank'):
        check_expert_size(LAYERS, config)
