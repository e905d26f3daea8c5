"""Tests of losses that apply to one batch only, and of options that apply to one step only."""

import math

import numpy as np
import pytest
import torch

from twinkle.data_format import LoraConfig
from twinkle.loss import build_loss
from twinkle.model.engine import BatchItem, ForwardResult, StepOptions, TrainerEngine
from twinkle.model.errors import InvalidArgument, InvalidStepOptions
from twinkle.processor import InvalidFeatures

RL = {'advantages': np.linspace(-1, 1, 12, dtype=np.float32), 'old_logps': np.full(12, -5.0, np.float32)}


def gradient_of(engine, name='a'):
    """Return the accumulated gradient as bytes."""
    return [item.grad.numpy().tobytes() for item in engine.adapter(name).parameters()]


def weights_of(engine, name='a'):
    """Return the weights as bytes."""
    return [item.detach().numpy().tobytes() for item in engine.adapter(name).parameters()]


@pytest.mark.parametrize('name', ['ppo', 'cispo', 'dro', 'importance_sampling', 'stable_reinforce', 'cross_entropy'])
def test_loss_of_one_batch_equals_the_adapters_loss(engine, make_feature, name):
    """A batch with a loss gives bitwise the same result as an adapter with that loss, even in a shared pass."""
    for other, seed in (('b', 3), ('c', 9)):
        engine.create_adapter(other, LoraConfig(r=4, lora_alpha=8, seed=seed))
    engine.set_loss('b', name)
    expected = engine.forward_backward('b', [make_feature(**RL)])
    items = [
        BatchItem(adapter_id='c', features=[make_feature(30, 5)], is_training=True),
        BatchItem(adapter_id='a', features=[make_feature(**RL)], is_training=True, loss=build_loss(name)),
    ]
    _, result = engine.run_batch(items)
    assert isinstance(result, ForwardResult)
    assert (result.loss, result.metrics) == (expected.loss, expected.metrics)
    assert gradient_of(engine) == gradient_of(engine, 'b')
    assert engine.adapter('a').loss_choice.name == 'CrossEntropyLoss'


def test_value_loss_of_one_batch_is_refused(engine, make_feature):
    """A value loss is refused for a single batch, because it would add a value head to the adapter."""
    with pytest.raises(InvalidArgument):
        engine.forward_backward('a', [make_feature()], loss=build_loss('PPOValueLoss'))
    assert engine.adapter('a').batch_count == 0
    assert engine.adapter('a').value_head is None


def test_tinkers_losses_return_labels_of_weight_0(engine, make_feature):
    """Tinker's `cross_entropy` returns the log-probabilities of labels with weight 0; their gradient is 0."""
    loss = build_loss('cross_entropy')
    weighted = engine.forward_only('a', [make_feature()], loss=loss)
    unweighted = engine.forward_only('a', [make_feature(loss_weights=np.zeros(12, np.float32))], loss=loss)
    np.testing.assert_array_equal(weighted.logps[0], unweighted.logps[0])
    assert np.count_nonzero(unweighted.logps[0]) == 8
    assert (unweighted.loss, unweighted.metrics) == (0.0, {'loss:sum': 0.0})
    trained = engine.forward_backward('a', [make_feature(loss_weights=np.zeros(12, np.float32))], loss=loss)
    assert trained.metrics == {'loss:sum': 0.0}
    assert all(not item.grad.any() for item in engine.adapter('a').parameters())
    assert engine.clip_grad_and_step('a', max_grad_norm=math.inf).grad_norm == 0.0


@pytest.mark.parametrize('is_shared', [False, True])
def test_labels_of_weight_0_only_add_log_probabilities(engine, make_feature, is_shared):
    """Labels of weight 0 get log-probabilities, but give bitwise the same loss and gradient as ignored labels."""
    engine.create_adapter('b', LoraConfig(r=4, lora_alpha=8, seed=3))
    engine.create_adapter('c', LoraConfig(r=4, lora_alpha=8, seed=9))
    for adapter in 'abc':
        _step(engine, adapter, make_feature(20, 7))
    loss, length = build_loss('cross_entropy'), 60
    whole = make_feature(length, 2)
    counted = np.arange(length) % 3 != 0
    partly = {**whole, 'loss_weights': counted.astype(np.float32)}
    ignored = {**whole, 'labels': np.where(counted, whole['labels'], -100)}
    every = engine.forward_only('a', [whole], loss=loss)
    items = [BatchItem(adapter_id='a', features=[partly], is_training=True, loss=loss)]
    if is_shared:
        items.append(BatchItem(adapter_id='c', features=[make_feature(30, 5)], is_training=True))
    result, *_ = engine.run_batch(items)
    expected = engine.forward_backward('b', [ignored], loss=loss)
    np.testing.assert_array_equal(result.logps[0], every.logps[0])
    assert np.count_nonzero(result.logps[0][~counted]) > 0
    assert result.loss == expected.loss
    assert gradient_of(engine) == gradient_of(engine, 'b')


def test_given_gradients_reach_labels_of_weight_0(engine, make_feature):
    """Gradients of a caller's own loss also count for labels of weight 0."""
    engine.set_loss('a', 'cross_entropy')
    gradients = [np.r_[np.zeros(4, np.float32), np.linspace(-1, 1, 8, dtype=np.float32)]]
    found = []
    for weight in (1.0, 0.0):
        engine.forward('a', [make_feature(loss_weights=np.full(12, weight, np.float32))])
        engine.backward('a', logprob_gradients=gradients)
        found.append(gradient_of(engine))
        engine.zero_grad('a')
    assert found[0] == found[1]
    assert any(np.frombuffer(item, np.float32).any() for item in found[0])


def _step(engine, adapter, feature):
    engine.forward_backward(adapter, [feature])
    engine.clip_grad_and_step(adapter)


def test_batch_without_labels_is_refused_for_tinkers_losses(engine, make_feature):
    """A batch whose labels are all masked is refused by Tinker's `cross_entropy`."""
    with pytest.raises(InvalidFeatures):
        engine.forward_backward(
            'a', [{**make_feature(), 'labels': np.full(12, -100)}], loss=build_loss('cross_entropy')
        )
    assert engine.adapter('a').batch_count == 0


def test_several_targets_per_label(engine, make_feature):
    """Several targets per label give log-probabilities [label, target] and the gradient of one batch per target."""
    feature = make_feature()
    ids = np.stack([feature['labels'], np.arange(12) + 7], axis=1)
    ids[:4] = 1
    weights = np.random.default_rng(1).normal(size=(12, 2)).astype(np.float32)
    loss = build_loss('cross_entropy')
    result = engine.forward_backward('a', [{**feature, 'target_ids': ids, 'target_weights': weights}], loss=loss)
    assert result.logps[0].shape == (12, 2)
    engine.create_adapter('b', LoraConfig(r=4, lora_alpha=8, seed=3))
    for column in range(2):
        labels = np.where(feature['labels'] == -100, -100, ids[:, column])
        one = {**feature, 'labels': labels, 'loss_weights': weights[:, column]}
        alone = engine.forward_backward('b', [one], loss=loss)
        np.testing.assert_allclose(result.logps[0][:, column], alone.logps[0], atol=1e-6)
    for own, other in zip(engine.adapter('a').parameters(), engine.adapter('b').parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, atol=1e-5, rtol=1e-4)


OPTIMIZER_OPTIONS = {'betas': [0.8, 0.9], 'eps': 1e-12, 'weight_decay': 0.3}


def train(engine, make_feature, *, own):
    """Train for three steps with options for each step or at creation; return the weights."""
    for seed in range(3):
        engine.forward_backward('a', [make_feature(20, seed)])
        step = {'step_options': StepOptions(learning_rate=0.02, optimizer_options=OPTIMIZER_OPTIONS)} if own else {}
        engine.clip_grad_and_step('a', max_grad_norm=math.inf, **step)
    return weights_of(engine)


def test_options_of_every_step_equal_the_optimizers_options(model, make_feature):
    """Options of every step give bitwise the same weights as an optimizer created with the same options."""
    results = []
    for own in (True, False):
        engine = TrainerEngine(model)
        engine.create_adapter('a', LoraConfig(r=4, seed=3))
        if not own:
            engine.set_optimizer('a', 'AdamW', lr=0.02, **OPTIMIZER_OPTIONS)
        results.append(train(engine, make_feature, own=own))
        engine.delete_adapter('a')
    assert results[0] == results[1]


@pytest.mark.parametrize('verb', ['step', 'clip_grad_and_step'])
@pytest.mark.parametrize(
    'options',
    [{'amsgrad': True}, {'lr': 1.0}, {'betas': [0.9]}, {'betas': [0.9, 1.0]}, {'eps': math.nan}, {'eps': '1'},
     {'weight_decay': math.inf}, {'foreach': True}, {'beta': 0.1}],
)  # fmt: skip
def test_invalid_step_options_are_refused(engine, make_feature, verb, options):
    """Unknown options, options that a step cannot change, and values out of range are refused and change nothing."""
    arguments = (
        {'optimizer_options': options} if verb == 'step' else {'step_options': StepOptions(optimizer_options=options)}
    )
    with pytest.raises(InvalidStepOptions):
        getattr(engine, verb)('a', **arguments)
    engine.forward_backward('a', [make_feature()])
    before = (weights_of(engine), gradient_of(engine), engine.adapter('a').optimization.copy_groups())
    with pytest.raises(InvalidStepOptions):
        getattr(engine, verb)('a', **arguments)
    assert before == (weights_of(engine), gradient_of(engine), engine.adapter('a').optimization.copy_groups())


def test_learning_rate_of_one_step(engine, make_feature):
    """A learning rate for one step is used unchanged, and the schedule still advances."""
    engine.set_lr_scheduler('a', 'ConstantLR', factor=0.5)
    engine.forward_backward('a', [make_feature()])
    result = engine.clip_grad_and_step('a', step_options=StepOptions(learning_rate=0.25))
    assert result.learning_rate == 0.25
    assert engine.adapter('a').scheduler.last_epoch == 1
    assert engine.adapter('a').learning_rate == 0.0005
