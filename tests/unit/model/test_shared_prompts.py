"""Prompts that several items of a batch share are computed once, with the results of separate rows."""

import json
import random

import numpy as np
import pytest
import torch

from fixtures.architectures import build_tiny
from fixtures.mixture_model import build_mixture
from fixtures.tiers import mostly_slow
from twinkle.data_format import InputFeature, LoraConfig
from twinkle.loss import CrossEntropyLoss, Loss
from twinkle.model.engine import BatchItem, ForwardOptions, TrainerEngine
from twinkle.nn import PackedCausalLM

PROMPT = 40
GROUP = 4


def engine_of(model, *, is_shared, config=None, names='a', **options):
    """Return an engine whose adapters are equal and have nonzero updates."""
    assert model.can_share_prefixes, 'the check at load found that shared rows change the results'
    model.can_share_prefixes = is_shared
    engine = TrainerEngine(model, **options)
    for name in names:
        state = engine.create_adapter(name, config or LoraConfig(r=4, lora_alpha=8, seed=1))
        for factors in state.weights.factors.values():
            factors.b.detach().normal_(std=0.1, generator=torch.Generator().manual_seed(2))
    return engine


def group(rng, *, prompt_length=PROMPT, size=GROUP, vocabulary=100, are_prompts_counted=False):
    """Return the samples of one prompt, with the streams of policy losses."""
    prompt = [rng.randrange(3, vocabulary) for _ in range(prompt_length)]
    features = []
    for _ in range(size):
        ids = np.array(prompt + [rng.randrange(3, vocabulary) for _ in range(rng.randint(1, 30))])
        labels = ids[1:].copy()
        if not are_prompts_counted:
            labels[: prompt_length - 1] = -100
        advantages = np.full(len(labels), rng.uniform(-1, 1), np.float32)
        old_logps = np.array([-rng.random() for _ in labels], np.float32)
        features.append(InputFeature(input_ids=ids[:-1], labels=labels, advantages=advantages, old_logps=old_logps))
    return features


def gradient_of(engine, name='a'):
    """Return the accumulated gradient of an adapter as one float64 tensor."""
    return torch.cat([parameter.grad.flatten().double() for parameter in engine.adapter(name).parameters()])


def assert_same_training(shared, separate, features, **options):
    """Train a batch on both engines; check for bitwise equal results and similar gradients; return shared tokens."""
    results = [engine.forward_backward('a', features, **options) for engine in (shared, separate)]
    for own, expected in zip(results[0].logps, results[1].logps, strict=True):
        np.testing.assert_array_equal(own, expected)
    assert results[0].loss_sum == results[1].loss_sum
    assert results[0].metrics == results[1].metrics
    own, expected = gradient_of(shared), gradient_of(separate)
    assert (own - expected).norm() <= 2e-6 * expected.norm()
    assert results[1].shared_token_count == 0
    assert results[0].token_count == results[1].token_count
    return results[0].shared_token_count


def engines(folder, **options):
    """Return an engine that shares prefixes and an engine that does not."""
    return [engine_of(PackedCausalLM.load(folder), is_shared=is_shared, **options) for is_shared in (True, False)]


@pytest.mark.parametrize('loss', ['CrossEntropyLoss', 'GRPOLoss', 'GSPOLoss', 'PPOLoss', 'CISPOLoss'])
@pytest.mark.parametrize('are_prompts_counted', [False, True])
def test_a_group_trains_bitwise_like_separate_rows(tiny_llama_dir, loss, are_prompts_counted):
    """Losses, metrics and log-probabilities of a group equal those of separate rows bitwise, gradients within 2e-6."""
    rng = random.Random(0)
    shared, separate = engines(tiny_llama_dir)
    for engine in (shared, separate):
        engine.set_loss('a', loss)
    features = [feature for _ in range(3) for feature in group(rng, are_prompts_counted=are_prompts_counted)]
    count = assert_same_training(shared, separate, features)
    assert count >= 3 * (GROUP - 1) * (PROMPT - 1)


@pytest.mark.parametrize('model_type', ['gemma3_text', 'qwen3_5_text', 'qwen3_moe', 'deepseek_v3', 'granite'])
@pytest.mark.parametrize('prompt_length', mostly_slow([64, 16, 63, 65, 150]))
@pytest.mark.filterwarnings('ignore::DeprecationWarning')
def test_every_kind_of_layer_shares_prompts_bitwise(tmp_path, model_type, prompt_length):
    """Windows, recurrent states, experts and latent attention give the results of separate rows."""
    build_tiny(model_type, tmp_path)
    rng = random.Random(prompt_length)
    shared, separate = engines(tmp_path, max_pass_tokens=4096)
    first, second = group(rng, prompt_length=prompt_length), group(rng, prompt_length=prompt_length)
    assert_same_training(shared, separate, [*first, *second])
    assert shared.forward_only('a', first).shared_token_count >= (GROUP - 1) * (prompt_length - 1)


@pytest.mark.parametrize('model_type', mostly_slow(['llama', 'deepseek_v3', 'qwen3_5_text']))
@pytest.mark.filterwarnings('ignore::DeprecationWarning')
def test_long_prompts_are_shared_bitwise(tmp_path, model_type):
    """Prefixes with more keys than one block of the attention kernel give the results of separate rows."""
    build_tiny(model_type, tmp_path)
    config = tmp_path / 'config.json'
    config.write_text(json.dumps({**json.loads(config.read_text()), 'max_position_embeddings': 2048}))
    shared, separate = engines(tmp_path, max_pass_tokens=8192)
    for length in (250, 300, 700):
        for engine in (shared, separate):
            engine.zero_grad('a')
        first = group(random.Random(length), prompt_length=length)
        assert assert_same_training(shared, separate, [*first, *group(random.Random(1), prompt_length=length)]) > 0


def test_passes_of_many_adapters_have_few_tokens(tiny_llama_dir):
    """The tokens of a pass of several adapters are limited, because labels of shared rows need memory too."""
    feature = group(random.Random(0), size=1)[0]
    engine = engine_of(PackedCausalLM.load(tiny_llama_dir), is_shared=True, names='abcd', max_pass_tokens=100)
    count = 8 * 100 // len(feature['input_ids']) - 1
    items = [BatchItem(adapter_id=name, features=[feature] * count, is_training=False) for name in 'abcd']
    assert [result.pass_adapter_count for result in engine.run_batch(items)] == [1, 1, 1, 1]


def test_bfloat16_prompts_are_shared_bitwise(tiny_llama_dir):
    """Log-probabilities of shared and separate rows are equal in bfloat16."""
    rng = random.Random(3)
    results = []
    features = [feature for length in (17, 33, 100) for feature in group(rng, prompt_length=length)]
    for is_shared in (True, False):
        engine = engine_of(PackedCausalLM.load(tiny_llama_dir, dtype='bfloat16'), is_shared=is_shared)
        results.append(engine.forward_backward('a', features))
    for own, expected in zip(results[0].logps, results[1].logps, strict=True):
        np.testing.assert_array_equal(own, expected)
    assert results[0].shared_token_count > 0


@pytest.mark.parametrize('seed', mostly_slow(range(12), kept=3))
def test_shared_prompts_keep_tenants_apart_bitwise(tiny_llama_dir, seed):
    """Results and gradients of an adapter do not depend on other adapters of the pass, even with equal prompts."""
    assert_kept_apart(tiny_llama_dir, random.Random(seed))


@pytest.mark.parametrize('model_type', mostly_slow(['gemma3_text', 'qwen3_5_text', 'qwen3_moe', 'deepseek_v3']))
@pytest.mark.filterwarnings('ignore::DeprecationWarning')
def test_every_kind_of_layer_keeps_tenants_apart_bitwise(tmp_path, model_type):
    """Prompt trees of adapters stay separate with windows, recurrent states, experts and latent attention."""
    build_tiny(model_type, tmp_path)
    for seed in range(3):
        assert_kept_apart(tmp_path, random.Random(seed))


def assert_kept_apart(folder, rng):
    """Train prompt trees of several adapters together and alone, and compare the results and gradients bitwise."""
    common = group(random.Random(9), prompt_length=100, size=3)
    items = [
        BatchItem(adapter_id=name, features=branches(rng, common[: rng.randint(2, 3)]), is_training=True)
        for name in 'abc'
    ]
    together, alone = (engine_of(PackedCausalLM.load(folder), is_shared=True, names='abc') for _ in range(2))
    for item, result in zip(items, together.run_batch(items), strict=True):
        (expected,) = alone.run_batch([item])
        assert [own.tobytes() for own in result.logps] == [own.tobytes() for own in expected.logps]
        assert result.shared_token_count == expected.shared_token_count > 0
        assert torch.equal(gradient_of(together, item.adapter_id), gradient_of(alone, item.adapter_id))


def branches(rng, origins):
    """Return examples that branch from the given examples, and from one another, at random positions."""
    features = list(origins)
    for _ in range(rng.randint(2, 8)):
        ids = rng.choice(features)['input_ids']
        begin = rng.randint(1, len(ids))
        own = np.array([rng.randrange(3, 100) for _ in range(rng.randint(1, 70))])
        ids = np.concatenate([ids[:begin], own])[:200]
        features.append(InputFeature(input_ids=ids[:-1], labels=ids[1:]) if len(ids) > 1 else origins[0])
    rng.shuffle(features)
    return [InputFeature(input_ids=feature['input_ids'], labels=feature['labels']) for feature in features]


@pytest.mark.parametrize('size', [30, 64, 100])
def test_parts_are_divided_by_computed_rows(tiny_llama_dir, size):
    """The computed rows limit a pass, so shared prompts need fewer passes if a prompt fits into a pass."""
    rng = random.Random(size)
    features = [feature for _ in range(4) for feature in group(rng)]
    engine = engine_of(PackedCausalLM.load(tiny_llama_dir), is_shared=True, max_pass_tokens=size)
    separate = engine_of(PackedCausalLM.load(tiny_llama_dir), is_shared=False, max_pass_tokens=size)
    own, expected = (each.forward_backward('a', features) for each in (engine, separate))
    assert (own.pass_count < expected.pass_count) is (size > PROMPT)
    for logps, others in zip(own.logps, expected.logps, strict=True):
        np.testing.assert_array_equal(logps, others)


def test_many_equal_items_are_divided_too(tiny_llama_dir):
    """Items without computed rows still need memory for their labels, so a pass takes a limited number of items."""
    feature = group(random.Random(0), size=1)[0]
    engine = engine_of(PackedCausalLM.load(tiny_llama_dir), is_shared=True, max_pass_tokens=100)
    result = engine.forward_only('a', [feature] * 100)
    assert result.pass_count > 1
    assert len({logps.tobytes() for logps in result.logps}) == 1


def test_split_verbs_share_prompts(tiny_llama_dir):
    """forward, calculate_loss and backward share prompts, and accumulate the gradient of forward_backward."""
    features = group(random.Random(1))
    whole, split = (engine_of(PackedCausalLM.load(tiny_llama_dir), is_shared=True) for _ in range(2))
    expected = whole.forward_backward('a', features)
    result = split.forward('a', features)
    assert result.shared_token_count == expected.shared_token_count > 0
    split.calculate_loss('a')
    split.backward('a')
    assert torch.equal(gradient_of(split), gradient_of(whole))


def test_dropout_is_not_shared(tiny_llama_dir):
    """Rows of an adapter with dropout are shared only in evaluation, because each row has another mask in training."""
    features = group(random.Random(1))
    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.5, seed=1)
    engine = engine_of(PackedCausalLM.load(tiny_llama_dir), is_shared=True, config=config)
    assert engine.forward_backward('a', features).shared_token_count == 0
    assert engine.forward_only('a', features).shared_token_count > 0


class _LogitLoss(Loss):
    """Loss that reads all logits."""

    required_outputs = ('logits',)

    def __call__(self, batch):
        return {'loss': batch.logits_RV.square().mean() + 0 * batch.logps_R.sum(), 'num_tokens': 0}


def test_rows_are_not_shared_if_all_logits_are_needed(tiny_llama_dir):
    """A pass with logits computes every row, because it has few labels."""
    engine = engine_of(PackedCausalLM.load(tiny_llama_dir), is_shared=True)
    result = engine.forward_only('a', group(random.Random(1)), loss=_LogitLoss())
    assert result.shared_token_count == 0


def test_embeddings_and_values_of_shared_rows(tiny_llama_dir):
    """Embeddings of equal last tokens and values of shared rows are those of separate rows."""
    features = group(random.Random(1), are_prompts_counted=True)
    features.append(features[0])
    options, results = ForwardOptions(more_outputs=('embeddings', 'values')), []
    for engine in engines(tiny_llama_dir):
        engine.set_loss('a', 'PPOValueLoss')
        results.append(engine.forward_only('a', features, options=options, loss=CrossEntropyLoss()))
    assert results[0].shared_token_count > 0
    for own, expected in zip(*([*result.outputs['embeddings'], *result.values] for result in results), strict=True):
        np.testing.assert_array_equal(own, expected)


def test_recorded_experts_of_shared_rows(tmp_path):
    """Each item gets the experts of all its tokens; replayed experts are shared where they are equal."""
    features = group(random.Random(1))
    options = ForwardOptions(more_outputs=('routed_experts',))
    folder = build_mixture(tmp_path)
    shared, separate = engines(folder)
    recorded = [engine.forward_only('a', features, options=options) for engine in (shared, separate)]
    assert recorded[0].shared_token_count > 0
    for own, expected in zip(*(result.outputs['routed_experts'] for result in recorded), strict=True):
        np.testing.assert_array_equal(own, expected)
    replayed = [
        InputFeature(**feature, routed_experts=experts)
        for feature, experts in zip(features, recorded[0].outputs['routed_experts'], strict=True)
    ]
    assert assert_same_training(shared, separate, replayed) == recorded[0].shared_token_count
