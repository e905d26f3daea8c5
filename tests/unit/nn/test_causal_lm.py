"""Tests of the packed forward path, compared with transformers, peft and other packs of the same rows."""

from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from fixtures.peft_oracle import build_peft_model, label_logprobs, lora_gradients
from twinkle.data_format import LoraConfig
from twinkle.nn import AdapterSpan, KVCache, LoraWeights, PackedCausalLM, PackError, SequenceSpan

FAMILIES = ('tiny_llama_dir', 'tiny_qwen2_dir', 'tiny_qwen3_dir')


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest) -> Path:
    """Folder of each tiny model."""
    return request.getfixturevalue(request.param)


def random_ids(length: int, seed: int = 0) -> torch.Tensor:
    """Return random token ids."""
    return torch.randint(0, 320, (length,), generator=torch.Generator().manual_seed(seed))


def random_weights(model: PackedCausalLM, config: LoraConfig, seed: int = 0) -> LoraWeights:
    """Return trainable weights with a nonzero B, so that the adapter has an effect."""
    weights = LoraWeights.create(model.layers, config, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for factors in weights.factors.values():
        factors.b.copy_(0.1 * torch.randn(factors.b.shape, generator=generator))
    return weights.requires_grad_(is_trainable=True)


def run_packed(model, sequences, adapters=(), *, is_training=False):
    """Run sequences in one pack; `adapters[i]` is the adapter of sequence i."""
    spans, adapter_spans, begin = [], [], 0
    for index, ids in enumerate(sequences):
        end = begin + len(ids)
        spans.append(SequenceSpan(begin, end))
        if adapters and adapters[index] is not None:
            dropout = adapters[index].sample_dropout() if is_training else None
            adapter_spans.append(AdapterSpan(begin, end, adapters[index], dropout))
        begin = end
    positions = torch.cat([torch.arange(len(ids)) for ids in sequences])
    return model.hidden(torch.cat(sequences), positions, sequences=spans, adapters=adapter_spans)


def test_logits_equal_transformers(folder):
    """Each sequence of a pack gets the logits that transformers computes for this sequence alone."""
    model = PackedCausalLM.load(folder)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    sequences = [random_ids(length, length) for length in (40, 3, 17)]
    with torch.no_grad():
        packed = model.logits(run_packed(model, sequences)).split([len(ids) for ids in sequences])
        for ids, logits in zip(sequences, packed, strict=True):
            torch.testing.assert_close(logits, plain(ids[None]).logits[0], atol=2e-5, rtol=0)


def test_gradients_equal_peft(folder):
    """Log-probabilities and LoRA gradients equal those of transformers with peft."""
    config = LoraConfig(r=4, lora_alpha=12, use_rslora=True, rank_pattern={'q_proj': 2}, alpha_pattern={'down_proj': 3})
    model = PackedCausalLM.load(folder)
    weights = random_weights(model, config)
    ids, labels = random_ids(30), random_ids(30, 9)
    logprobs = model.label_logprobs(run_packed(model, [ids], [weights]), labels)
    (-logprobs.mean()).backward()
    oracle_config = peft.LoraConfig(
        r=4,
        lora_alpha=12,
        use_rslora=True,
        target_modules='all-linear',
        rank_pattern={'q_proj': 2},
        alpha_pattern={'down_proj': 3},
    )
    oracle = build_peft_model(folder, oracle_config, weights.peft_state())
    expected = label_logprobs(oracle, ids.tolist(), labels.tolist())
    (-expected.mean()).backward()
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    gradients = lora_gradients(oracle)
    own = weights.named_parameters()
    assert own.keys() == gradients.keys()
    for name, tensor in own.items():
        torch.testing.assert_close(tensor.grad, gradients[name], atol=1e-5, rtol=1e-4)


def test_packing_does_not_change_results(tiny_llama_dir):
    """A sequence gets bitwise the same result alone and in a pack with sequences of other adapters."""
    model = PackedCausalLM.load(tiny_llama_dir)
    weights = random_weights(model, LoraConfig(r=4))
    others = [random_weights(model, LoraConfig(r=8, target_modules=('q_proj', 'down_proj')), 5), None]
    ids = random_ids(20)
    alone = run_packed(model, [ids], [weights])
    packed = run_packed(model, [random_ids(33, 1), ids, random_ids(5, 2)], [others[0], weights, others[1]])[33:53]
    assert torch.equal(alone, packed)


def test_cache_continues_a_sequence(folder):
    """Prefill in two parts, followed by single tokens, gives the result of one pass over the sequence."""
    model = PackedCausalLM.load(folder)
    ids = random_ids(100)
    with torch.inference_mode():
        whole = run_packed(model, [ids])
        cache = KVCache()
        parts = []
        for begin, end in [(0, 20), (20, 60), *((row, row + 1) for row in range(60, 100))]:
            span = SequenceSpan(0, end - begin, cache)
            parts.append(model.hidden(ids[begin:end], torch.arange(begin, end), sequences=[span]))
    assert cache.length == 100
    torch.testing.assert_close(torch.cat(parts), whole, atol=2e-5, rtol=0)


def test_copied_cache_is_independent(tiny_llama_dir):
    """Appending to a cache does not affect its copy."""
    model = PackedCausalLM.load(tiny_llama_dir)
    ids = random_ids(10)
    with torch.inference_mode():
        cache = KVCache()
        model.hidden(ids[:8], torch.arange(8), sequences=[SequenceSpan(0, 8, cache)])
        duplicate = cache.copy()
        expected = model.hidden(ids[8:], torch.arange(8, 10), sequences=[SequenceSpan(0, 2, cache)])
        assert (cache.length, duplicate.length) == (10, 8)
        other = model.hidden(ids[8:], torch.arange(8, 10), sequences=[SequenceSpan(0, 2, duplicate)])
    assert torch.equal(expected, other)


def test_dropout_depends_only_on_its_own_generator(tiny_llama_dir):
    """Dropout depends on the adapter's seed, and does not depend on the rest of the pack."""
    model = PackedCausalLM.load(tiny_llama_dir)
    config = LoraConfig(r=4, lora_dropout=0.5)
    ids = random_ids(20)
    alone = run_packed(model, [ids], [random_weights(model, config)], is_training=True)
    beside = run_packed(
        model,
        [random_ids(7, 3), ids],
        [random_weights(model, config, 4), random_weights(model, config)],
        is_training=True,
    )
    evaluated = run_packed(model, [ids], [random_weights(model, config)])
    assert torch.equal(alone, beside[7:])
    assert not torch.equal(alone, evaluated)


def test_logprob_blocks_and_temperature_equal_log_softmax(tiny_llama_dir):
    """Blockwise log-probabilities with a temperature, and their hand-written gradient, equal those of torch."""
    model = PackedCausalLM.load(tiny_llama_dir)
    hidden = torch.randn(300, 64, generator=torch.Generator().manual_seed(1))
    labels = random_ids(300, 4)
    factors = torch.linspace(-1, 1, 300)
    results = []
    for function in (
        lambda h: model.label_logprobs(h, labels, temperature=0.7),
        lambda h: (model.logits(h) / 0.7).log_softmax(-1).gather(1, labels[:, None])[:, 0],
    ):
        leaf = hidden.clone().requires_grad_()
        logprobs = function(leaf)
        (gradient,) = torch.autograd.grad((factors * logprobs).sum(), leaf)
        results.append((logprobs, gradient))
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ('spans', 'adapters'),
    [
        ([], []),
        ([SequenceSpan(0, 3)], []),
        ([SequenceSpan(0, 4)], [AdapterSpan(2, 5, None)]),
        ([SequenceSpan(0, 2), SequenceSpan(2, 4, parent=1)], []),
        ([SequenceSpan(0, 2), SequenceSpan(2, 4, parent=-1)], []),
        ([SequenceSpan(0, 2, KVCache()), SequenceSpan(2, 4, parent=0)], []),
        ([SequenceSpan(0, 2), SequenceSpan(2, 4, KVCache(), parent=0)], []),
        ([SequenceSpan(0, 2), SequenceSpan(2, 4, parent=0)], [AdapterSpan(0, 2, None)]),
        ([SequenceSpan(0, 2), SequenceSpan(2, 4, parent=0)], [AdapterSpan(0, 2, None), AdapterSpan(2, 4, None)]),
    ],
)
def test_inconsistent_spans_are_refused(tiny_llama_dir, spans, adapters):
    """Spans that do not cover the rows, adapters past the last row, and parents of other adapters are refused."""
    model = PackedCausalLM.load(tiny_llama_dir)
    with pytest.raises(PackError):
        model.hidden(random_ids(4), torch.arange(4), sequences=spans, adapters=adapters)


def test_properties_come_from_the_configuration(tiny_llama_dir):
    """Vocabulary size, maximum length, end tokens and layer shapes are read from the model's configuration."""
    model = PackedCausalLM.load(tiny_llama_dir)
    assert (model.vocab_size, model.max_position_embeddings, model.eos_token_ids) == (320, 512, (2,))
    assert model.layers['model.layers.0.self_attn.k_proj'] == (64, 32)
    assert 'lm_head' not in model.layers
