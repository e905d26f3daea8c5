"""Tests of the trainer's methods; some tests compare with transformers and peft."""

import math

import numpy as np
import peft
import pytest
import torch

from fixtures.peft_oracle import build_peft_model, label_logprobs, lora_gradients
from twinkle.component import InvalidComponentOptions, UnknownComponent
from twinkle.data_format import LoraConfig
from twinkle.model.engine import ForwardOptions, TrainerEngine
from twinkle.model.errors import AdapterExists, AdapterNotReady, InvalidArgument, LossNotFinite, UnknownAdapter
from twinkle.nn import PackedCausalLM
from twinkle.processor import InvalidFeatures


def gradients_of(engine, adapter_id='a'):
    """Return copies of the accumulated gradient."""
    return [parameter.grad.clone() for parameter in engine.adapter(adapter_id).weights.parameters()]


def weights_of(engine, adapter_id='a'):
    """Return copies of the weights."""
    return [parameter.detach().clone() for parameter in engine.adapter(adapter_id).weights.parameters()]


def train(engine, batches, adapter_id='a'):
    """Run training steps; return the losses."""
    losses = []
    for batch in batches:
        losses.append(engine.forward_backward(adapter_id, batch).loss)
        engine.clip_grad_and_step(adapter_id)
    return losses


@pytest.mark.parametrize('family', ['tiny_llama_dir', 'tiny_qwen3_dir', 'tiny_gemma_dir'])
def test_training_equals_transformers_and_peft(family, request, make_feature):
    """Losses, gradients and three AdamW steps equal those of a loop with transformers and peft."""
    folder = request.getfixturevalue(family)
    engine = TrainerEngine(PackedCausalLM.load(folder))
    engine.create_adapter('a', LoraConfig(r=4, lora_alpha=8, seed=3))
    engine.set_optimizer('a', 'AdamW', lr=1e-2, weight_decay=0.1)
    oracle = build_peft_model(
        folder,
        peft.LoraConfig(r=4, lora_alpha=8, target_modules='all-linear'),
        engine.adapter('a').weights.peft_state(),
    )
    parameters = [parameter for parameter in oracle.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)
    for step in range(3):
        batch = [
            make_feature(length, length + step, loss_weights=np.linspace(0.5, 2, length)) for length in (20, 7, 13)
        ]
        result = engine.forward_backward('a', batch)
        logprobs = [label_logprobs(oracle, list(f['input_ids']), list(f['labels'])) for f in batch]
        weighted = sum(
            -(values * torch.tensor(f['loss_weights'])).sum() for values, f in zip(logprobs, batch, strict=True)
        )
        count = sum(int((f['labels'] != -100).sum()) for f in batch)
        optimizer.zero_grad()
        (weighted / count).backward()
        assert result.num_tokens == count
        assert result.loss == pytest.approx((weighted / count).item(), abs=1e-5)
        for own, expected in zip(result.logps, logprobs, strict=True):
            np.testing.assert_allclose(own, expected.detach().numpy(), atol=2e-5)
        expected_gradients = lora_gradients(oracle)
        for name, parameter in engine.adapter('a').weights.named_parameters().items():
            torch.testing.assert_close(parameter.grad / count, expected_gradients[name], atol=1e-5, rtol=1e-3)
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        assert engine.clip_grad_norm('a') == pytest.approx(float(norm), rel=1e-4)
        optimizer.step()
        engine.step('a')
        engine.zero_grad('a')


def test_other_adapters_do_not_change_results(model, make_feature):
    """An adapter's results are bitwise unchanged if another adapter is trained in between."""
    batches = [[make_feature(9, step), make_feature(17, step + 50)] for step in range(3)]
    alone, shared = TrainerEngine(model), TrainerEngine(model)
    for engine in (alone, shared):
        engine.create_adapter('a', LoraConfig(r=4, lora_dropout=0.2, seed=1))
    shared.create_adapter('b', LoraConfig(r=8, lora_dropout=0.5, seed=2))
    losses = train(alone, batches)
    for batch, loss in zip(batches, losses, strict=True):
        shared.forward_backward('b', [make_feature(30, 99)])
        assert train(shared, [batch]) == [loss]
        shared.clip_grad_and_step('b')
    assert all(torch.equal(x, y) for x, y in zip(weights_of(alone), weights_of(shared), strict=True))


def test_padding_does_not_change_results(engine, make_feature):
    """Padding on either side does not change log-probabilities, which are 0.0 at masked tokens."""
    bare = make_feature(10)
    ids, labels = bare['input_ids'], bare['labels']
    for left, right in ((0, 6), (6, 0)):
        pad = lambda values, fill, left=left, right=right: np.pad(values, (left, right), constant_values=fill)  # noqa: E731
        padded = {
            'input_ids': pad(ids, 2), 'labels': pad(labels, -100), 'attention_mask': pad(np.ones(10, int), 0),
        }  # fmt: skip
        expected = engine.forward_only('a', [bare]).logps[0]
        np.testing.assert_array_equal(engine.forward_only('a', [padded]).logps[0], pad(expected, 0.0))


def test_packed_feature_equals_separate_ones(engine, make_feature):
    """Samples packed into one feature have the log-probabilities of separate features."""
    first, second = make_feature(10, 1), make_feature(8, 2)
    packed = {
        'input_ids': np.concatenate([first['input_ids'], second['input_ids']]),
        'labels': np.concatenate([first['labels'], second['labels']]),
        'position_ids': np.concatenate([np.arange(10), np.arange(8)]),
    }
    apart = engine.forward_only('a', [first, second])
    together = engine.forward_only('a', [packed])
    np.testing.assert_array_equal(together.logps[0], np.concatenate(apart.logps))


def test_a_large_batch_runs_in_parts(model, make_feature):
    """A batch that runs in several passes gives the loss and gradient of one pass."""
    batch = [make_feature(length, length) for length in (20, 3, 15, 9)]
    batch[2]['labels'] = np.full(15, -100)
    whole, parted = TrainerEngine(model), TrainerEngine(model, max_pass_tokens=16)
    for engine in (whole, parted):
        engine.create_adapter('a', LoraConfig(r=4, seed=3))
    expected, result = whole.forward_backward('a', batch), parted.forward_backward('a', batch)
    assert (result.num_tokens, result.token_count) == (expected.num_tokens, expected.token_count)
    assert result.loss_sum == pytest.approx(expected.loss_sum, rel=1e-6)
    for own, other in zip(gradients_of(parted), gradients_of(whole), strict=True):
        torch.testing.assert_close(own, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(('micro_batch_size', 'max_pass_tokens'), [(1, 10), (2, 20), (3, 30)])
def test_micro_batches_limit_the_examples_of_a_pass(model, make_feature, micro_batch_size, max_pass_tokens):
    """`micro_batch_size` gives bitwise the same gradients as a token limit that fits the same number of examples."""
    batch = [make_feature(10, index) for index in range(7)]
    expected, divided = TrainerEngine(model, max_pass_tokens=max_pass_tokens), TrainerEngine(model)
    for engine in (expected, divided):
        engine.create_adapter('a', LoraConfig(r=4, seed=3))
    expected.forward_backward('a', batch)
    divided.forward_backward('a', batch, options=ForwardOptions(micro_batch_size=micro_batch_size))
    for own, other in zip(gradients_of(divided), gradients_of(expected), strict=True):
        assert torch.equal(own, other)


def test_micro_batches_do_not_divide_groups(model, make_feature):
    """Pairs stay in one pass; a loss that compares all examples refuses the division before any change."""
    pairs = [make_feature(10, index, ref_logps=np.zeros(10, np.float32)) for index in range(4)]
    expected, divided = TrainerEngine(model, max_pass_tokens=20), TrainerEngine(model)
    for engine in (expected, divided):
        engine.create_adapter('a', LoraConfig(r=4, seed=3))
        engine.set_loss('a', 'DPOLoss')
    expected.forward_backward('a', pairs)
    divided.forward_backward('a', pairs, options=ForwardOptions(micro_batch_size=1))
    for own, other in zip(gradients_of(divided), gradients_of(expected), strict=True):
        assert torch.equal(own, other)
    divided.zero_grad('a')
    divided.set_loss('a', 'InfonceLoss')
    with pytest.raises(InvalidArgument, match='micro_batch_size 2'):
        divided.forward_backward('a', pairs, options=ForwardOptions(micro_batch_size=2))
    assert all(parameter.grad is None for parameter in divided.adapter('a').weights.parameters())
    with pytest.raises(InvalidArgument, match='forward runs a batch in one pass'):
        divided.forward('a', pairs, options=ForwardOptions(micro_batch_size=2))
    with pytest.raises(InvalidArgument, match='micro_batch_size'):
        ForwardOptions(micro_batch_size=0)


def test_accumulated_batches_equal_one_large_one(model, make_feature):
    """Accumulated batches of unequal length give the weights of one joint batch."""
    batches = [[make_feature(20, 1)], [make_feature(8, 2), make_feature(5, 3)]]
    split, joined = TrainerEngine(model), TrainerEngine(model)
    split.create_adapter('a', LoraConfig(r=4, seed=3), gradient_accumulation_steps=2)
    joined.create_adapter('a', LoraConfig(r=4, seed=3))
    for engine in (split, joined):
        engine.set_lr_scheduler('a', 'LinearWarmupScheduler', num_warmup_steps=0, num_training_steps=10)
    applied = []
    for batch in batches:
        split.forward_backward('a', batch)
        assert (split.clip_grad_norm('a') is None) == (not applied)
        applied.append(split.step('a').is_applied)
        split.zero_grad('a')
        applied.append(split.lr_step('a').is_applied)
    assert applied == [False, False, True, True]
    joined.forward_backward('a', batches[0] + batches[1])
    joined.clip_grad_and_step('a')
    assert split.adapter('a').learning_rate == joined.adapter('a').learning_rate
    for own, other in zip(weights_of(split), weights_of(joined), strict=True):
        torch.testing.assert_close(own, other, atol=1e-5, rtol=0)


def test_sum_reduction_does_not_divide_the_gradient(engine, make_feature):
    """The gradient norm with reduction 'sum' is the norm with 'mean' times the number of labels."""
    batch = [make_feature(20)]
    norms = {}
    for reduction in ('sum', 'mean'):
        engine.set_loss('a', 'CrossEntropyLoss', reduction=reduction)
        count = engine.forward_backward('a', batch).num_tokens
        norms[reduction] = engine.clip_grad_norm('a', max_grad_norm=1e9)
        engine.zero_grad('a')
    assert norms['sum'] == pytest.approx(norms['mean'] * count, rel=1e-5)


def test_forward_loss_backward_equals_forward_backward(engine, make_feature):
    """Separate forward, loss and backward calls, and backward with custom gradients, equal forward_backward."""
    batch = [make_feature(20, 1), make_feature(6, 2)]
    expected_logps = engine.forward_backward('a', batch).logps
    expected = gradients_of(engine)
    engine.zero_grad('a')
    logps = engine.forward('a', batch).logps
    engine.calculate_loss('a')
    engine.backward('a')
    assert all(torch.equal(x, y) for x, y in zip(gradients_of(engine), expected, strict=True))
    np.testing.assert_array_equal(logps[1], expected_logps[1])
    engine.zero_grad('a')
    engine.forward('a', batch)
    engine.backward('a', logprob_gradients=[-(feature['labels'] != -100).astype(np.float32) for feature in batch])
    assert all(torch.equal(x, y) for x, y in zip(gradients_of(engine), expected, strict=True))


def test_forward_only_changes_nothing_and_can_disable_the_adapter(engine, make_feature):
    """Evaluation counts no training batch; with a disabled adapter, it evaluates the base model."""
    batch = [make_feature(20)]
    fresh = engine.forward_only('a', batch)
    engine.set_optimizer('a', 'AdamW', lr=0.1)
    train(engine, [batch])
    assert engine.forward_only('a', batch).loss != fresh.loss
    disabled = engine.forward_only('a', batch, options=ForwardOptions(is_adapter_disabled=True))
    assert disabled.loss == pytest.approx(fresh.loss, abs=1e-6)
    assert engine.adapter('a').batch_count == 0


def test_training_learns(engine, make_feature):
    """The loss on one batch falls by more than half in 25 steps."""
    engine.set_optimizer('a', 'AdamW', lr=2e-2)
    losses = train(engine, [[make_feature(20, 1), make_feature(9, 2)]] * 25)
    assert losses[-1] < 0.5 * losses[0]


def test_learning_rate_of_one_step(engine, make_feature):
    """A learning rate that is given for one step applies only to this step."""
    engine.set_optimizer('a', 'SGD', lr=0.5)
    engine.forward_backward('a', [make_feature()])
    before = weights_of(engine)
    assert engine.step('a', learning_rate=0.0).learning_rate == 0.0
    assert all(torch.equal(x, y) for x, y in zip(weights_of(engine), before, strict=True))
    assert engine.step('a').learning_rate == 0.5


def test_a_report_resets_the_metrics(engine, make_feature):
    """The loss metric is a mean over labels since the last report; evaluation has separate metrics."""
    results = [engine.forward_backward('a', [make_feature(length, length)]) for length in (8, 20)]
    engine.clip_grad_and_step('a')
    engine.forward_only('a', [make_feature(5, 9)])
    values = engine.calculate_metric('a')
    labels = sum(result.num_tokens for result in results)
    assert values['loss'] == pytest.approx(sum(result.loss_sum for result in results) / labels)
    assert (values['label_count'], values['step_count']) == (labels, 1.0)
    assert all(type(value) is float and math.isfinite(value) for value in values.values())
    assert 'loss' not in engine.calculate_metric('a')
    assert engine.calculate_metric('a', is_training=False)['label_count'] == 4.0


def test_loss_that_is_not_finite_adds_nothing(engine, make_feature):
    """The error for a loss that is not finite has the feature's index, and nothing changes."""
    engine.forward_backward('a', [make_feature()])
    before = gradients_of(engine)
    with torch.no_grad():
        engine.adapter('a').weights.parameters()[-1].fill_(float('nan'))
    random_state = engine.adapter('a').weights.dropout_generator.get_state()
    with pytest.raises(LossNotFinite) as refusal:
        engine.forward_backward('a', [make_feature()])
    assert refusal.value.feature_index == 0
    assert all(torch.equal(x, y) for x, y in zip(gradients_of(engine), before, strict=True))
    assert torch.equal(engine.adapter('a').weights.dropout_generator.get_state(), random_state)


def test_a_batch_without_a_counting_label_is_refused(engine, make_feature):
    """A batch whose labels all have weight 0 is refused for training and accepted for evaluation."""
    batch = [make_feature(6, loss_weights=np.zeros(6))]
    with pytest.raises(InvalidFeatures) as refusal:
        engine.forward_backward('a', batch)
    assert refusal.value.field == 'labels'
    assert engine.forward_only('a', batch).num_tokens == 0


def test_methods_without_prerequisites_are_refused(engine):
    """Methods that need a gradient, a schedule or a forward pass are refused without it."""
    for verb in (engine.clip_grad_norm, engine.step, engine.lr_step, engine.calculate_loss, engine.backward):
        with pytest.raises(AdapterNotReady):
            verb('a')


def test_unknown_and_taken_ids_are_refused(engine):
    """Unknown adapter ids and ids in use are refused."""
    with pytest.raises(UnknownAdapter, match='ghost'):
        engine.step('ghost')
    with pytest.raises(AdapterExists):
        engine.create_adapter('a', LoraConfig())
    engine.delete_adapter('a')
    with pytest.raises(UnknownAdapter):
        engine.delete_adapter('a')


def test_unknown_components_and_options_are_refused(engine):
    """Unknown components, invalid options and a temperature of 0 are refused, and the optimizer is kept."""
    optimizer = engine.adapter('a').optimizer
    with pytest.raises(UnknownComponent, match='AdamW'):
        engine.set_optimizer('a', 'AdamX')
    with pytest.raises(InvalidComponentOptions, match='learning_rate'):
        engine.set_optimizer('a', 'AdamW', learning_rate=1.0)
    with pytest.raises(InvalidComponentOptions, match='Invalid learning rate'):
        engine.set_optimizer('a', 'AdamW', lr=-1.0)
    with pytest.raises(InvalidComponentOptions):
        engine.set_lr_scheduler('a', 'CosineWarmupScheduler', num_warmup_steps=5)
    with pytest.raises(InvalidComponentOptions):
        engine.set_loss('a', 'CrossEntropyLoss', reduction='average')
    for name in ('self', 'adapter_id', 'params'):
        with pytest.raises(InvalidComponentOptions, match='unknown options'):
            engine.set_optimizer('a', 'AdamW', **{name: 1})
    with pytest.raises(InvalidArgument):
        ForwardOptions(temperature=0.0)
    assert engine.adapter('a').optimizer is optimizer


def test_too_large_learning_rate_is_refused(engine, make_feature):
    """A learning rate that is too large is refused, whether it is given or computed by the schedule."""
    engine.set_optimizer('a', 'AdamW', lr=1.0)
    engine.set_lr_scheduler('a', 'ExponentialLR', gamma=1e30)
    engine.forward_backward('a', [make_feature(8)])
    engine.step('a')
    before = [parameter.clone() for parameter in engine.adapter('a').weights.parameters()]
    with pytest.raises(InvalidArgument):
        engine.step('a', learning_rate=1e308)
    for _ in range(2):
        engine.lr_step('a')
    with pytest.raises(AdapterNotReady, match='learning rate'):
        engine.step('a')
    assert all(map(torch.equal, before, engine.adapter('a').weights.parameters()))


def test_schedule_without_steps_left_is_refused(engine, make_feature):
    """`lr_step` is refused when the schedule has no steps left."""
    engine.set_lr_scheduler('a', 'OneCycleLR', max_lr=0.1, total_steps=2)
    engine.forward_backward('a', [make_feature(8)])
    engine.step('a')
    for _ in range(2):
        engine.lr_step('a')
    with pytest.raises(AdapterNotReady, match='schedule'):
        engine.lr_step('a')


def test_dropout_follows_the_seed(model, make_feature):
    """The same seed gives the same dropout masks, and a different seed gives different masks."""
    losses = []
    for seed in (1, 1, 2):
        engine = TrainerEngine(model)
        engine.create_adapter('a', LoraConfig(r=4, lora_dropout=0.5, seed=seed))
        with torch.no_grad():
            for index, parameter in enumerate(engine.adapter('a').weights.parameters()):
                parameter.copy_(torch.linspace(-0.2, 0.2, parameter.numel()).reshape(parameter.shape) * (index % 3))
        losses.append(engine.forward_backward('a', [make_feature(20)]).loss)
    assert losses[0] == losses[1] != losses[2]
