"""Conversion of LoRA configurations and manifests to messages and back."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle.api.model.v1 import training_config_pb2
from twinkle.checkpoint_engine import iter_chunks, pack_state, value_at
from twinkle.data_format import LoraConfig, TensorData
from twinkle.data_format.lora import in_effect
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.weights.wire import (
    chunk_from_proto,
    chunk_to_proto,
    lora_config_from_proto,
    lora_config_to_proto,
    manifest_from_proto,
    manifest_to_proto,
)

_NAMES = st.text(min_size=1, max_size=6)
_PATHS = st.lists(st.sampled_from('abq'), min_size=1, max_size=4).map('.'.join)
_DATA = (b'ab', b'cd')
_MANIFEST = pack_state({'w': TensorData('uint8', (2,), _DATA[0])}, base_model='m', lora_config=LoraConfig()).manifest
_ALPHAS = st.floats(0.001, 1000)

configs = st.builds(
    LoraConfig,
    r=st.integers(1, 512),
    lora_alpha=_ALPHAS,
    lora_dropout=st.floats(0, 0.99),
    target_modules=st.just('all-linear') | st.lists(_NAMES, min_size=1, max_size=4).map(tuple),
    use_rslora=st.booleans(),
    rank_pattern=st.dictionaries(_NAMES, st.integers(1, 64), max_size=3),
    alpha_pattern=st.dictionaries(_NAMES, _ALPHAS, max_size=3),
    seed=st.none() | st.integers(-(1 << 63), (1 << 63) - 1),
)


@given(config=configs)
def test_lora_config_round_trip(config: LoraConfig) -> None:
    """A round trip keeps all fields, including an unset seed, and the pattern names that have an effect."""
    ranks, alphas = in_effect(config.rank_pattern), in_effect(config.alpha_pattern)
    expected = replace(config, rank_pattern=ranks, alpha_pattern=alphas)
    assert lora_config_from_proto(lora_config_to_proto(config), 'x') == expected


@given(pattern=st.dictionaries(_PATHS, st.integers(1, 64), max_size=6), path=_PATHS)
def test_rank_and_alpha_of_each_layer_survive(pattern: dict[str, int], path: str) -> None:
    """Each layer keeps its rank and alpha, although messages do not keep the order of patterns."""
    config = LoraConfig(rank_pattern=pattern, alpha_pattern=pattern)
    converted = lora_config_from_proto(lora_config_to_proto(config), 'x')
    for found in (converted.rank_pattern, converted.alpha_pattern):
        assert value_at(found, path, 0) == value_at(pattern, path, 0)


def test_longest_pattern_name_takes_precedence() -> None:
    """The longest matching name takes precedence, regardless of the order in the message."""
    message = training_config_pb2.LoraConfig(rank_pattern={'q': 2, '1.q': 5, 'layers.1.q': 7})
    config = lora_config_from_proto(message, 'x')
    paths = ('layers.0.q', 'a.1.q', 'layers.1.q')
    assert [value_at(config.rank_pattern, path, 0) for path in paths] == [2, 5, 7]


def test_unset_fields_have_the_defaults_of_the_library() -> None:
    """An empty message is converted to the default configuration."""
    assert lora_config_from_proto(training_config_pb2.LoraConfig(), 'x') == LoraConfig()


@pytest.mark.parametrize(
    ('fields', 'field'),
    [
        ({'lora_rank': 0}, 'lora_rank'),
        ({'lora_rank': -4}, 'lora_rank'),
        ({'lora_alpha': 0.0}, 'lora_alpha'),
        ({'lora_alpha': float('inf')}, 'lora_alpha'),
        ({'lora_alpha': float('nan')}, 'lora_alpha'),
        ({'lora_dropout': 1.0}, 'lora_dropout'),
        ({'lora_dropout': float('nan')}, 'lora_dropout'),
        ({'lora_dropout': -0.1}, 'lora_dropout'),
        ({'target_modules': ['q_proj', '']}, 'target_modules'),
        ({'rank_pattern': {'q': 0}}, "rank_pattern['q']"),
        ({'alpha_pattern': {'q': -1.0}}, "alpha_pattern['q']"),
    ],
)
def test_invalid_values_name_the_field(fields: dict[str, object], field: str) -> None:
    """The refusal of an invalid value contains the complete path of the field."""
    with pytest.raises(InvalidField) as caught:
        lora_config_from_proto(training_config_pb2.LoraConfig(**fields), 'a.b')  # type: ignore[arg-type]
    assert caught.value.field == f'a.b.{field}'


@given(config=configs, size=st.integers(0, 300))
def test_manifest_and_chunks_round_trip(config: LoraConfig, size: int) -> None:
    """A round trip keeps the tensor entries, the digest and the data."""
    adapter = {'w': TensorData('uint8', (size,), bytes(size)), 's': TensorData('bfloat16', (), b'ab')}
    trainer = {'w': TensorData('int64', (1, 1), bytes(8))}
    state = pack_state(adapter, base_model='org/m', lora_config=config, trainer=trainer)
    assert manifest_from_proto(manifest_to_proto(state.manifest), 'x') == state.manifest
    for chunk in iter_chunks(state.data, chunk_bytes=64):
        assert chunk_from_proto(chunk_to_proto(chunk)) == chunk


def test_versions_of_a_run_share_their_entries() -> None:
    """Manifests with equal tensor entries share one object, and all other fields come from each message."""
    config = LoraConfig()
    states = [pack_state({'w': TensorData('uint8', (2,), data)}, base_model='m', lora_config=config) for data in _DATA]
    first, second = (manifest_from_proto(manifest_to_proto(state.manifest), 'x') for state in states)
    assert (first, second) == (states[0].manifest, states[1].manifest)
    assert first.tensors is second.tensors
    assert first.layout is second.layout


@pytest.mark.parametrize(
    ('change', 'field'),
    [({'digest': 'x'}, 'a.digest'), ({'base_model': ''}, 'a.base_model'), ({'size_bytes': 3}, 'a.size_bytes')],
)
def test_manifest_similar_to_a_cached_one_is_checked(change: dict[str, object], field: str) -> None:
    """A cached manifest does not hide an error in a similar manifest, even if the error is sent repeatedly."""
    message = manifest_to_proto(_MANIFEST)
    manifest_from_proto(message, 'a')
    for name, value in change.items():
        setattr(message, name, value)
    for _ in range(2):
        with pytest.raises(InvalidField) as caught:
            manifest_from_proto(message, 'a')
        assert caught.value.field == field


def test_different_entries_are_not_confused() -> None:
    """A manifest that differs from a cached one in a single tensor entry is checked separately."""
    message = manifest_to_proto(_MANIFEST)
    manifest_from_proto(message, 'a')
    message.tensors[0].offset = 1
    with pytest.raises(InvalidField) as caught:
        manifest_from_proto(message, 'a')
    assert caught.value.field == 'a.tensors[0].offset'
    renamed = replace(_MANIFEST, tensors=(replace(_MANIFEST.tensors[0], name='v'),))
    assert manifest_from_proto(manifest_to_proto(renamed), 'a') == renamed
