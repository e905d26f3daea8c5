"""Models and passes whose rows cannot be divided among ranks are refused before any communication."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures.mixture_model import build_mixture
from fixtures.tiny_model import build_tiny_model
from twinkle.infra import DeviceMesh, NotSupportedYet
from twinkle.model.engine import TrainerEngine
from twinkle.model.engine.mesh_engine import EngineOptions, load_on_mesh
from twinkle.nn import ExpertRouting, KVCache, PackedCausalLM, PackError, SequenceSpan, UnsupportedModel
from twinkle.parallel import check_divisible, divide_rows

DELTA_NET = {'model_type': 'qwen3_next', 'num_hidden_layers': 4, 'num_attention_heads': 4, 'num_key_value_heads': 2}
VISION = {
    'model_type': 'qwen2_5_vl',
    'text_config': {'model_type': 'qwen2_5_vl_text', 'num_attention_heads': 4, 'num_key_value_heads': 2},
    'vision_config': {'model_type': 'qwen2_5_vl'},
}


@pytest.mark.parametrize(
    ('config', 'size', 'message'),
    [
        ({}, 3, r'ulysses_size 3 must divide num_attention_heads \(2\)'),
        (DELTA_NET, 2, 'ulysses_size does not support Gated DeltaNet'),
        (VISION, 2, 'ulysses_size supports only text models'),
    ],
)
def test_model_is_refused_by_its_configuration(config: dict[str, Any], size: int, message: str, tmp_path: Path) -> None:
    """Unsuitable models are refused by their configuration, even if the folder has no weights."""
    folder = build_tiny_model(tmp_path)
    (folder / 'model.safetensors').unlink()
    if config:
        (folder / 'config.json').write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=message):
        check_divisible(folder, size)


def test_model_is_accepted(tmp_path: Path) -> None:
    """A text model whose heads the ranks can divide is accepted, even with fewer key-value heads than ranks."""
    check_divisible(build_tiny_model(tmp_path), 2)


def test_megatron_is_refused(tmp_path: Path) -> None:
    """`ulysses_size` together with Megatron-core is refused before the model is read."""
    options = EngineOptions(device='cpu', max_pass_tokens=8, is_megatron=True)
    with pytest.raises(NotSupportedYet, match='MegatronModel does not support ulysses_size'):
        load_on_mesh(tmp_path, DeviceMesh.from_sizes(ulysses_size=2), options)


class FirstOfTwo:
    """Process group whose second rank is missing, so that every communication would fail."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


def test_passes_that_need_all_rows_are_refused(tmp_path: Path) -> None:
    """A model with divided rows refuses caches, chosen experts and full-parameter runs, and pads rows on each rank."""
    group: Any = FirstOfTwo()
    model = PackedCausalLM.load(build_mixture(tmp_path))
    shape, token = model.routing, torch.zeros(1, dtype=torch.int64)
    assert shape is not None
    alone = model.padded_count(20, 1)
    divide_rows(model, group)
    assert model.routing is None
    assert (alone, model.padded_count(20, 1)) == (24, 32)
    with pytest.raises(PackError, match='sequences with a cache'):
        model.hidden(token, token, sequences=[SequenceSpan(0, 1, KVCache())])
    with pytest.raises(PackError, match='experts can be neither recorded nor replaced'):
        model.hidden(token, token, sequences=[SequenceSpan(0, 1)], routing=ExpertRouting(shape))
    with pytest.raises(UnsupportedModel, match='full-parameter training does not support ulysses_size'):
        TrainerEngine(model).create_full_adapter('whole')
