"""Tests that results in shared passes do not depend, bitwise, on the other adapters of a pass."""

import random

import numpy as np
import pytest
import torch

from twinkle.data_format import STREAMS, LoraConfig
from twinkle.loss import LOSSES
from twinkle.metric import LossMetric
from twinkle.model.engine import BatchItem, ForwardOptions, ForwardResult, TrainerEngine
from twinkle.model.errors import InvalidArgument, LossNotFinite, MetricFailed, UnknownAdapter
from twinkle.nn import PackedCausalLM
from twinkle.processor import InputProcessor, InvalidFeatures

TARGETS = ('all-linear', ('q_proj', 'v_proj'), ('down_proj',), ('o_proj', 'gate_proj', 'up_proj'))


LOSS_OPTIONS = {
    'GRPOLoss': {'beta': 0.1, 'entropy_coef': 0.01},
    'SoftCrossEntropyLoss': {'reduction': 'sum'},
}


def random_config(rng):
    """Return a random LoRA configuration."""
    return LoraConfig(
        r=rng.choice((1, 2, 4, 8, 16, 17)),
        lora_alpha=rng.choice((1, 8, 32)),
        lora_dropout=rng.choice((0.0, 0.0, 0.3)),
        target_modules=rng.choice(TARGETS),
        use_rslora=rng.random() < 0.3,
        seed=rng.randrange(1000),
    )


def random_item(rng, make_feature, adapter_id):
    """Return a random batch of one to four features."""
    features = [make_feature(rng.randint(2, 40), rng.randrange(1000)) for _ in range(rng.randint(1, 4))]
    is_training = rng.random() < 0.75
    options = ForwardOptions(
        temperature=rng.choice((1.0, 0.7, 1.3)),
        is_adapter_disabled=not is_training and rng.random() < 0.3,
    )
    return BatchItem(adapter_id=adapter_id, features=features, options=options, is_training=is_training)


def result_bytes(result):
    """Return losses, token count and log-probabilities of a result in a form for bitwise comparison."""
    return (
        np.float64(result.loss_sum).tobytes(), np.float64(result.loss).tobytes(), result.num_tokens,
        [logps.tobytes() for logps in result.logps],
    )  # fmt: skip


def state_bytes(engine, adapter_id):
    """Return weights, gradient and random state of an adapter as bytes."""
    state = engine.adapter(adapter_id)
    tensors = [tensor for item in state.parameters() for tensor in (item.detach(), item.grad) if tensor is not None]
    return [tensor.numpy(force=True).tobytes() for tensor in tensors] + [
        state.weights.dropout_generator.get_state().numpy().tobytes()
    ]


def assert_isolated(model, configs, rounds, *, max_pass_tokens=64):
    """Run rounds of items together and separately, with a step after each round, and compare all results bitwise."""
    shared = TrainerEngine(model, max_pass_tokens=max_pass_tokens)
    alone = {adapter_id: TrainerEngine(model, max_pass_tokens=max_pass_tokens) for adapter_id in configs}
    for adapter_id, config in configs.items():
        for engine in (shared, alone[adapter_id]):
            engine.create_adapter(adapter_id, config)
            engine.set_optimizer(adapter_id, 'AdamW', lr=0.05)
    for items in rounds:
        for item, result in zip(items, shared.run_batch(items), strict=True):
            single = alone[item.adapter_id]
            assert_same(result, single.run_batch([item])[0])
            assert state_bytes(shared, item.adapter_id) == state_bytes(single, item.adapter_id)
            for engine in (shared, single):
                step_if_ready(engine, item.adapter_id)
    for adapter_id, single in alone.items():
        assert state_bytes(shared, adapter_id) == state_bytes(single, adapter_id)


def assert_same(result, expected):
    """Compare two results of the same batch bitwise, or two errors by type."""
    assert type(result) is type(expected)
    if isinstance(result, ForwardResult):
        assert result_bytes(result) == result_bytes(expected)


def step_if_ready(engine, adapter_id):
    """Clip and step an adapter that has a gradient."""
    if engine.adapter(adapter_id).batch_count:
        engine.clip_grad_norm(adapter_id, max_grad_norm=0.5)
        engine.clip_grad_and_step(adapter_id)


@pytest.mark.parametrize('family', ['tiny_llama_dir', 'tiny_qwen3_dir', 'tiny_gemma_dir'])
@pytest.mark.parametrize('seed', range(3))
def test_any_mix_equals_separate_runs(request, make_feature, family, seed):
    """Mixed ranks, targets, dropout, lengths and temperatures give results bitwise equal to those of separate runs."""
    rng = random.Random(seed)
    model = PackedCausalLM.load(request.getfixturevalue(family))
    configs = {f'tenant-{index}': random_config(rng) for index in range(rng.randint(2, 5))}
    rounds = [[random_item(rng, make_feature, name) for name in configs] for _ in range(3)]
    assert_isolated(model, configs, rounds, max_pass_tokens=rng.choice((24, 64, 1024)))


def test_bfloat16_adapters_are_isolated(tiny_qwen2_dir, make_feature):
    """Adapters of a bfloat16 model with biases are bitwise isolated."""
    rng = random.Random(5)
    model = PackedCausalLM.load(tiny_qwen2_dir, dtype='bfloat16')
    configs = {f'tenant-{index}': random_config(rng) for index in range(4)}
    rounds = [[random_item(rng, make_feature, name) for name in configs] for _ in range(3)]
    assert_isolated(model, configs, rounds, max_pass_tokens=200)


def feature_for_all(make_feature, seed):
    """Return a feature that has every stream."""
    rng = np.random.default_rng(seed)
    length = int(rng.integers(6, 14))
    numbers = lambda *shape: rng.normal(size=(length, *shape)).astype(np.float32) * 0.3  # noqa: E731
    streams = {name: numbers() for name, spec in STREAMS.items() if not spec.is_wide}
    ids = rng.integers(3, 300, (length, 4))
    return make_feature(
        length,
        seed,
        **streams | {'teacher_topk_ids': ids, 'teacher_topk_logps': np.log(np.full((length, 4), 0.2, np.float32))},
        target_ids=ids,
        target_weights=np.abs(numbers(4)),
        teacher_logits=numbers(320),
    )


def test_all_losses_share_passes_bitwise(model, make_feature):
    """Adapters with all losses get bitwise the same results, metrics and gradients in shared passes and alone."""
    shared = TrainerEngine(model, max_pass_tokens=400)
    batch = [feature_for_all(make_feature, seed) for seed in range(4)]
    anchored = [{'input_ids': item['input_ids'], 'labels': [(n + 1) % 2]} for n, item in enumerate(batch)]
    items, alone = [], {}
    for seed, name in enumerate(LOSSES.names):
        alone[name] = TrainerEngine(model, max_pass_tokens=400)
        for engine in (shared, alone[name]):
            engine.create_adapter(name, LoraConfig(r=4, seed=seed, target_modules=('q_proj', 'down_proj')))
            engine.set_loss(name, name, **LOSS_OPTIONS.get(name, {}))
        features = anchored if name == 'InfonceLoss' else batch
        items.append(BatchItem(adapter_id=name, features=features, is_training=True))
    for _ in range(2):
        for item, result in zip(items, shared.run_batch(items), strict=True):
            expected = alone[item.adapter_id].run_batch([item])[0]
            assert isinstance(result, ForwardResult), result
            assert (result_bytes(result), result.metrics) == (result_bytes(expected), expected.metrics)
            assert result.pass_adapter_count > 1
            assert state_bytes(shared, item.adapter_id) == state_bytes(alone[item.adapter_id], item.adapter_id)
            for engine in (shared, alone[item.adapter_id]):
                engine.clip_grad_and_step(item.adapter_id)


@pytest.mark.parametrize(
    ('loss', 'options'),
    [('CrossEntropyLoss', {}), ('GRPOLoss', {'entropy_coef': 0.1}), ('GKDLoss', {}), ('PPOValueLoss', {})],
)
def test_failing_adapters_do_not_affect_others(model, make_feature, loss, options):
    """Adapters with invalid or overflowing weights, and refused batches, do not change other adapters' results."""
    names = ('healthy', 'not-a-number', 'infinite', 'overflowing', 'refused', 'also-healthy')
    shared, alone = TrainerEngine(model), TrainerEngine(model)
    for engine, own in ((shared, names), (alone, ('healthy', 'also-healthy'))):
        for name in own:
            engine.create_adapter(name, LoraConfig(r=4, seed=names.index(name), lora_dropout=0.2))
            engine.set_loss(name, loss, **options)
    with torch.no_grad():
        for name, value in (('not-a-number', float('nan')), ('infinite', float('inf')), ('overflowing', 3e38)):
            for parameter in shared.adapter(name).parameters():
                parameter.fill_(value)
    before = {name: state_bytes(shared, name) for name in names}
    batch = [feature_for_all(make_feature, 1), feature_for_all(make_feature, 2)]
    items = [BatchItem(adapter_id=name, features=batch, is_training=True) for name in names]
    items[4] = BatchItem(adapter_id='refused', features=[{'input_ids': [1, 2]}], is_training=True)
    results = dict(zip(names, shared.run_batch(items), strict=True))
    for name in ('not-a-number', 'infinite', 'overflowing'):
        assert isinstance(results[name], LossNotFinite)
        assert state_bytes(shared, name) == before[name]
    assert isinstance(results['refused'], InvalidFeatures)
    for name, item in (('healthy', items[0]), ('also-healthy', items[5])):
        assert results[name].pass_adapter_count == 5
        assert result_bytes(results[name]) == result_bytes(alone.run_batch([item])[0])
        assert state_bytes(shared, name) == state_bytes(alone, name)


def test_infinite_gradient_is_refused(model, make_feature):
    """A finite loss with an infinite gradient is refused without changes to any adapter."""
    shared = TrainerEngine(model)
    for name in 'ab':
        shared.create_adapter(name, LoraConfig(r=4, seed=1, lora_dropout=0.3))
    shared.set_loss('a', lambda batch: {'loss': (batch.logps_R - batch.logps_R.detach()).sqrt().sum()})
    before = state_bytes(shared, 'a')
    items = [BatchItem(adapter_id=name, features=[make_feature(9)], is_training=True) for name in 'ab']
    refusal, result = shared.run_batch(items)
    assert isinstance(refusal, LossNotFinite)
    assert state_bytes(shared, 'a') == before
    assert shared.adapter('a').batch_count == 0
    alone = TrainerEngine(model)
    alone.create_adapter('b', LoraConfig(r=4, seed=1, lora_dropout=0.3))
    assert result_bytes(alone.run_batch([items[1]])[0]) == result_bytes(result)
    assert state_bytes(alone, 'b') == state_bytes(shared, 'b')


class _FailingBackward(torch.autograd.Function):
    """Identity function whose derivative raises."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError('no derivative')


def _raises(batch):
    raise RuntimeError('broken')


@pytest.mark.parametrize(
    'loss',
    [
        _raises,
        lambda batch: {'loss': batch.logps_R},
        lambda batch: {'loss': 1.0},
        lambda batch: {'loss': torch.zeros(())},
        lambda batch: {},
        lambda batch: {'loss': _FailingBackward.apply(batch.logps_R).sum()},
        lambda batch: {'loss': batch.logps_R.mul_(0).sum()},
        lambda batch: {'loss': batch.logps_R.sum(), 'num_tokens': 10**309},
        lambda batch: {'loss': batch.logps_R.sum(), 'num_tokens': -1},
        lambda batch: {'loss': batch.logps_R.sum(), 'metrics': {'vector': torch.ones(2)}},
        lambda batch: {'loss': batch.logps_R.sum(), 'metrics': 7},
        lambda batch: {'loss': batch.logps_R.sum(), 'metric_weight': 'much'},
    ],
    ids=[
        'raises',
        'vector',
        'number',
        'constant',
        'nothing',
        'no-derivative',
        'in-place',
        'divisor-too-large',
        'divisor-negative',
        'metric-no-number',
        'metrics-no-mapping',
        'weight-no-number',
    ],
)
def test_a_loss_that_fails_does_not_affect_others(model, make_feature, loss):
    """A faulty custom loss is refused for its adapter; other results are bitwise equal to those of separate runs."""
    shared, alone = TrainerEngine(model), TrainerEngine(model)
    for engine, names in ((shared, 'abc'), (alone, 'b')):
        for name in names:
            engine.create_adapter(name, LoraConfig(r=4, seed=2, lora_dropout=0.3))
    shared.set_loss('a', loss)
    before = state_bytes(shared, 'a')
    items = [BatchItem(adapter_id=name, features=[make_feature(9)], is_training=True) for name in 'abc']
    results = shared.run_batch(items)
    assert isinstance(results[0], InvalidArgument)
    assert state_bytes(shared, 'a') == before
    assert result_bytes(results[1]) == result_bytes(alone.run_batch([items[1]])[0])
    assert state_bytes(shared, 'b') == state_bytes(alone, 'b')


class BrokenMetric(LossMetric):
    """Metric that raises on every batch."""

    def accumulate(self, facts):
        raise RuntimeError('broken')


def test_a_metric_that_fails_does_not_affect_others(model, make_feature):
    """A batch whose metric raises is refused and counted in no metric; other adapters are unaffected."""
    shared, alone = TrainerEngine(model), TrainerEngine(model)
    for engine, names in ((shared, 'ab'), (alone, 'b')):
        for name in names:
            engine.create_adapter(name, LoraConfig(r=4, seed=2, lora_dropout=0.3))
    shared.add_metric('a', BrokenMetric())
    before = state_bytes(shared, 'a')
    items = [BatchItem(adapter_id=name, features=[make_feature(9)], is_training=True) for name in 'ab']
    refusal, result = shared.run_batch(items)
    assert isinstance(refusal, MetricFailed)
    assert state_bytes(shared, 'a') == before
    assert 'loss' not in shared.calculate_metric('a')
    assert result_bytes(result) == result_bytes(alone.run_batch([items[1]])[0])
    assert state_bytes(shared, 'b') == state_bytes(alone, 'b')


class BrokenProcessor(InputProcessor):
    """Processor that raises on every batch."""

    def prepare(self, features):
        raise KeyError('broken')


def test_a_processor_that_fails_does_not_affect_others(model, make_feature):
    """A batch whose custom processor raises is refused; other adapters are unaffected."""
    engine = TrainerEngine(model)
    for name in 'ab':
        engine.create_adapter(name, LoraConfig(r=4, seed=2))
    engine.set_processor('a', BrokenProcessor())
    items = [BatchItem(adapter_id=name, features=[make_feature(9)], is_training=True) for name in 'ab']
    refusal, result = engine.run_batch(items)
    assert isinstance(refusal, InvalidArgument)
    assert isinstance(result, ForwardResult)


def test_division_into_parts_is_independent(model, make_feature):
    """Batches are divided by the token limit of a pass; training batches that fit together share a pass."""
    engine = TrainerEngine(model, max_pass_tokens=32)
    for name in 'abc':
        engine.create_adapter(name, LoraConfig(r=4, seed=1))
    large = [make_feature(10, seed) for seed in range(6)]
    items = [
        BatchItem(adapter_id='a', features=[make_feature(12)], is_training=True),
        BatchItem(adapter_id='b', features=large, is_training=True),
        BatchItem(adapter_id='c', features=[make_feature(12)], is_training=False),
    ]
    a, b, c = engine.run_batch(items)
    assert (a.pass_count, b.pass_count, c.pass_count) == (1, 2, 1)
    assert (a.pass_adapter_count, b.pass_adapter_count, c.pass_adapter_count) == (1, 1, 1)
    engine = TrainerEngine(model, max_pass_tokens=72)
    for name in 'abc':
        engine.create_adapter(name, LoraConfig(r=4, seed=1))
    a, b, c = engine.run_batch(items)
    assert (a.pass_adapter_count, b.pass_adapter_count, c.pass_adapter_count) == (2, 2, 1)
    assert [result.token_count for result in (a, b, c)] == [12, 60, 12]
    assert all(result.device_seconds > 0 for result in (a, b, c))


def test_errors_are_returned(engine, make_feature):
    """Errors about unknown or disabled adapters and invalid features are returned; a duplicate adapter raises."""
    items = [
        BatchItem(adapter_id='ghost', features=[make_feature()], is_training=True),
        BatchItem(adapter_id='a', features=[], is_training=False),
    ]
    assert [type(result) for result in engine.run_batch(items)] == [UnknownAdapter, InvalidFeatures]
    disabled = ForwardOptions(is_adapter_disabled=True)
    item = BatchItem(adapter_id='a', features=[make_feature()], options=disabled, is_training=True)
    assert isinstance(engine.run_batch([item])[0], InvalidArgument)
    assert engine.run_batch([]) == []
    with pytest.raises(InvalidArgument):
        engine.run_batch([item, item])
