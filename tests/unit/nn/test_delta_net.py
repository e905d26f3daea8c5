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


ACCELERATOR = pytest.param(
    'cuda', marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason='needs an accelerator')]
)


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model with three recurrent layers and one attention layer."""
    folder = tmp_path_factory.mktemp('model')
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(CONFIG).save_pretrained(folder)
    return folder


@pytest.fixture(scope='module')
def model(folder: Path) -> PackedCausalLM:
    """The tiny model in float32 on the CPU."""
    return PackedCausalLM.load(folder)


@pytest.mark.parametrize('device', ['cpu', ACCELERATOR])
@pytest.mark.parametrize('length', [1, CHUNK_ROWS, 2 * CHUNK_ROWS + 3])
def test_chunks_equal_the_recurrence_row_by_row(length, device):
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
        arguments = [None if x is None else x.to(device) for x in (query, key, value, decay, beta, initial)]
        outputs, states = gated_delta_rule(*arguments)
        torch.testing.assert_close(outputs.cpu(), torch.stack(expected), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(states[-1].cpu(), memory, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize('steps', [(1,) * 12, (50, 1, 1, 17, 1, 60), (64, 64)])
def test_passes_with_a_cache_equal_one_pass(model, steps):
    """A sequence that runs in several passes gets the results of one pass, for any division."""
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


@pytest.mark.parametrize('device', ['cpu', ACCELERATOR])
@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_half_precision_differs_only_by_rounding(folder, model, dtype, device):
    """The median row of half-precision results, in a pack and in several passes, differs from float32 by under 3%."""
    half = PackedCausalLM.load(folder, dtype=dtype, device=device)
    lengths = (70, 5, 33)
    ids = torch.randint(1, 128, (sum(lengths),), generator=torch.Generator().manual_seed(3))
    positions = torch.cat([torch.arange(length) for length in lengths])
    spans = [SequenceSpan(0, 70), SequenceSpan(70, 75), SequenceSpan(75, 108)]
    cache, begin, parts = KVCache(), 0, []
    with torch.inference_mode():
        expected = model.hidden(ids, positions, sequences=spans)
        packed = half.hidden(ids.to(device), positions.to(device), sequences=spans)
        for count in (40, 1, 29):
            rows = torch.arange(begin, begin + count)
            span = SequenceSpan(0, count, cache)
            parts.append(half.hidden(ids[rows].to(device), rows.to(device), sequences=[span]))
            begin += count
    for own, wide in ((packed, expected), (torch.cat(parts), expected[:70])):
        differences = (own.cpu().float() - wide).norm(dim=1) / wide.norm(dim=1)
        assert differences.median() < 0.03


def test_a_copied_cache_has_an_independent_state(model):
    """Two continuations of one prompt, one from a cache and one from its copy, do not affect each other."""
    ids = torch.randint(1, 128, (12,), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        cache = KVCache()
        model.hidden(ids[:8], torch.arange(8), sequences=[SequenceSpan(0, 8, cache)])
        duplicate = cache.copy()
        expected = model.hidden(ids[8:], torch.arange(8, 12), sequences=[SequenceSpan(0, 4, cache)])
        actual = model.hidden(ids[8:], torch.arange(8, 12), sequences=[SequenceSpan(0, 4, duplicate)])
    assert torch.equal(actual, expected)
