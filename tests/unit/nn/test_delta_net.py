"""Tests of the gated delta rule and of the state of recurrent layers between forward passes."""

from pathlib import Path

import pytest
import torch
import transformers

from twinkle.nn import KVCache, PackedCausalLM, SequenceSpan
from twinkle.nn.delta_net import CHUNK_ROWS, gated_delta_rule

CONFIG = transformers.Qwen3_5TextConfig(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=128,
    max_position_embeddings=256,
    pad_token_id=0,
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=16,
)


@pytest.fixture(scope='module')
def model(tmp_path_factory: pytest.TempPathFactory) -> PackedCausalLM:
    """A tiny model with three recurrent layers and one attention layer."""
    folder: Path = tmp_path_factory.mktemp('model')
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(CONFIG).save_pretrained(folder)
    return PackedCausalLM.load(folder)


@pytest.mark.parametrize('length', [1, CHUNK_ROWS, 2 * CHUNK_ROWS + 3])
def test_chunks_equal_the_recurrence_row_by_row(length):
    """The chunked form equals the definition of the rule, with and without an initial state."""
    generator = torch.Generator().manual_seed(length)
    heads, keys, values = 2, 8, 5
    query, key = (
        torch.nn.functional.normalize(torch.randn(length, heads, keys, generator=generator), dim=-1) for _ in range(2)
    )
    value = torch.randn(length, heads, values, generator=generator)
    decay = -torch.rand(length, heads, generator=generator)
    beta = torch.rand(length, heads, generator=generator)
    for initial in (None, torch.randn(heads, keys, values, generator=generator)):
        memory = torch.zeros(heads, keys, values) if initial is None else initial
        expected = []
        for row in range(length):
            memory = memory * decay[row].exp()[:, None, None]
            error = beta[row][:, None] * (value[row] - torch.einsum('hk,hkv->hv', key[row], memory))
            memory = memory + key[row][:, :, None] * error[:, None, :]
            expected.append(torch.einsum('hk,hkv->hv', query[row], memory))
        outputs, state = gated_delta_rule(query, key, value, decay, beta, initial)
        torch.testing.assert_close(outputs, torch.stack(expected), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(state, memory, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize('steps', [(1,) * 12, (50, 1, 1, 17, 1, 60), (64, 64)])
def test_passes_with_a_cache_equal_one_pass(model, steps):
    """A sequence that is run in several passes gets the results of one pass, however it is divided."""
    length = sum(steps)
    ids = torch.randint(1, 128, (length,), generator=torch.Generator().manual_seed(1))
    cache, parts, begin = KVCache(), [], 0
    with torch.inference_mode():
        whole = model.hidden(ids, torch.arange(length), sequences=[SequenceSpan(0, length)])
        for count in steps:
            span = SequenceSpan(0, count, cache)
            positions = torch.arange(begin, begin + count)
            parts.append(model.hidden(ids[begin : begin + count], positions, sequences=[span]))
            begin += count
    torch.testing.assert_close(torch.cat(parts), whole, atol=2e-5, rtol=0)


def test_a_copied_cache_has_an_independent_state(model):
    """Two continuations of one prompt, from a cache and its copy, do not affect each other."""
    ids = torch.randint(1, 128, (12,), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        cache = KVCache()
        model.hidden(ids[:8], torch.arange(8), sequences=[SequenceSpan(0, 8, cache)])
        duplicate = cache.copy()
        expected = model.hidden(ids[8:], torch.arange(8, 12), sequences=[SequenceSpan(0, 4, cache)])
        actual = model.hidden(ids[8:], torch.arange(8, 12), sequences=[SequenceSpan(0, 4, duplicate)])
    assert torch.equal(actual, expected)
