"""Conversion of operations: valid fields are converted, and invalid fields are refused with their path."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle.api.data.v1 import input_feature_pb2
from twinkle.api.model.v1 import operation_pb2 as wire
from twinkle.api.model.v1 import training_config_pb2
from twinkle.api.tensor.v1 import tensor_pb2
from twinkle.data_format import EXTRA_STREAMS, LayerHealth, StepResult
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.rpc.json_values import struct_of
from twinkle_services.kit.rpc.tensors import tensor_to_proto
from twinkle_services.model.api.convert_config import training_config_from_proto, training_config_to_proto
from twinkle_services.model.api.convert_operation import operation_from_proto
from twinkle_services.model.api.convert_result import result_to_proto
from twinkle_services.model.domain import operation as domain
from twinkle_services.model.domain import result as outcome
from twinkle_services.model.domain.training_config import Component, LossChoice, TrainingConfig

VOCABULARY = 50


def converted(**verb):
    """Convert an operation with this verb; return the converted verb."""
    message = wire.Operation(adapter_id='a', sequence_number=1, **verb)
    return operation_from_proto(message, 'operation', vocabulary_size=VOCABULARY).verb


def refused_field(**verb):
    """Return the path of the refused field."""
    with pytest.raises(InvalidField) as refusal:
        converted(**verb)
    return refusal.value.field


def training_verb(**extra):
    """Return forward_backward for one example of four tokens with these extra tensors."""
    ids = tensor_to_proto(np.arange(4, dtype=np.int32))
    tensors = {name: tensor_to_proto(value) for name, value in extra.items()}
    feature = input_feature_pb2.InputFeature(input_ids=ids, labels=ids, extra_tensors=tensors)
    batch = wire.Batch()
    batch.features.features.append(feature)
    return wire.ForwardBackward(batch=batch)


def test_gradient_limits_are_converted():
    """Gradient limits, a learning rate of 0 and the health flag are converted; unset fields have default values."""
    verb = converted(clip_grad_norm=wire.ClipGradNorm(max_grad_value=0.5, norm_type=math.inf))
    assert verb == domain.ClipGradNorm(max_grad_value=0.5, norm_type=math.inf)
    verb = converted(clip_grad_and_step=wire.ClipGradAndStep(max_grad_norm=2.0, is_health_returned=True))
    assert verb == domain.ClipGradAndStep(max_grad_norm=2.0, is_health_returned=True)
    assert converted(step=wire.Step(learning_rate=0.0)) == domain.Step(learning_rate=0.0)
    assert converted(step=wire.Step(is_health_returned=True)) == domain.Step(is_health_returned=True)


def test_the_size_of_micro_batches_is_converted():
    """The number of examples in a pass is optional and positive, and may divide a batch into at most 64 passes."""
    verb = training_verb()
    assert converted(forward_backward=verb).options.micro_batch_size is None
    verb.options.micro_batch_size = 3
    assert converted(forward_backward=verb).options.micro_batch_size == 3
    verb.options.micro_batch_size = 0
    assert refused_field(forward_backward=verb) == 'operation.forward_backward.options.micro_batch_size'
    for _ in range(128):
        verb.batch.features.features.append(verb.batch.features.features[0])
    verb.options.micro_batch_size = 2
    assert refused_field(forward_backward=verb) == 'operation.forward_backward.options.micro_batch_size'
    verb.options.micro_batch_size = 3
    assert converted(forward_backward=verb).options.micro_batch_size == 3


def test_options_of_a_step_are_converted():
    """Step and ClipGradAndStep convert the learning rate and options, and accept an infinite maximum norm."""
    options = {'betas': [0.9, 0.95], 'eps': 1e-12, 'weight_decay': 0}
    fields = {'learning_rate': 1e-4, 'optimizer_options': struct_of(options)}
    values = {'learning_rate': 1e-4, 'optimizer_options': options}
    assert converted(step=wire.Step(**fields)) == domain.Step(**values)
    converted_verb = converted(clip_grad_and_step=wire.ClipGradAndStep(max_grad_norm=math.inf, **fields))
    assert converted_verb == domain.ClipGradAndStep(max_grad_norm=math.inf, **values)


@pytest.mark.parametrize('verb', ['step', 'clip_grad_and_step'])
@pytest.mark.parametrize(
    ('fields', 'field'),
    [
        ({'learning_rate': -1.0}, 'learning_rate'),
        ({'learning_rate': math.nan}, 'learning_rate'),
        ({'optimizer_options': struct_of({'lr': 0.1})}, 'optimizer_options.lr'),
    ],
)
def test_a_malformed_option_of_a_step_is_named(verb, fields, field):
    """The error for a malformed option has its path, for both verbs that step."""
    kinds = {'step': wire.Step, 'clip_grad_and_step': wire.ClipGradAndStep}
    assert refused_field(**{verb: kinds[verb](**fields)}) == f'operation.{verb}.{field}'


def test_loss_of_a_batch_is_converted():
    """ForwardOnly and ForwardBackward accept a loss for the batch; if it is unset, the adapter's loss is used."""
    loss = training_config_pb2.LossConfig(name='ppo', options=struct_of({'clip_low_threshold': 0.9}))
    chosen = LossChoice(name='ppo', options={'clip_low_threshold': 0.9})
    batch = training_verb().batch
    for name, kind in (('forward_only', wire.ForwardOnly), ('forward_backward', wire.ForwardBackward)):
        assert converted(**{name: kind(batch=batch, loss=loss)}).loss == chosen
        assert converted(**{name: kind(batch=batch)}).loss is None


@pytest.mark.parametrize(
    ('name', 'value'),
    [('max_grad_norm', value) for value in (0.0, -1.0, math.nan)]
    + [('max_grad_value', value) for value in (0.0, -1.0, math.inf, math.nan)],
)
def test_an_invalid_limit_is_refused(name, value):
    """Zero, negative and NaN limits are refused with their path; an infinite limit for elements is refused too."""
    assert refused_field(clip_grad_norm=wire.ClipGradNorm(**{name: value})) == f'operation.clip_grad_norm.{name}'


@pytest.mark.parametrize('count', [0, -3])
def test_undo_needs_at_least_one_step(count):
    """An undo of fewer than one step is refused."""
    assert refused_field(undo=wire.Undo(step_count=count)) == 'operation.undo.step_count'
    assert converted(undo=wire.Undo(step_count=2)) == domain.Undo(step_count=2)


@pytest.mark.parametrize('name', ['', '../up', 'a/b', 'x' * 129])
def test_export_name_must_not_be_a_path(name):
    """An empty, overlong or path-like export name is refused, and a plain name is converted."""
    assert refused_field(export_merged=wire.ExportMerged(name=name)) == 'operation.export_merged.name'
    assert converted(export_merged=wire.ExportMerged(name='merged-1')) == domain.ExportMerged(name='merged-1')


def test_extra_streams_are_converted_by_name():
    """Extra tensors of numbers and ids are converted to the type that their stream declares."""
    ids = np.arange(8, dtype=np.int64).reshape(4, 2)
    logps = -np.ones((4, 2), np.float32)
    verb = converted(
        forward_backward=training_verb(teacher_topk_ids=ids, teacher_topk_logps=logps, returns=np.ones(4, np.float32))
    )
    feature = verb.features[0]
    np.testing.assert_array_equal(feature['teacher_topk_ids'], ids)
    np.testing.assert_array_equal(feature['teacher_topk_logps'], logps)
    assert feature['returns'].shape == (4,)


HOSTILE = {
    'unknown name': ('noise', np.ones(4, np.float32), ''),
    'a field of the message': ('advantages', np.ones(4, np.float32), ''),
    'ids as floats': ('teacher_topk_ids', np.ones((4, 2), np.float32), '.dtype'),
    'floats as ids': ('returns', np.ones(4, np.int32), '.dtype'),
    'flat where wide': ('teacher_topk_logps', np.ones(4, np.float32), '.shape'),
    'wide where flat': ('old_values', np.ones((4, 1), np.float32), '.shape'),
    'too few rows': ('teacher_logits', np.ones((3, 2), np.float32), '.shape'),
    'no columns': ('teacher_logits', np.ones((4, 0), np.float32), '.shape'),
    'id out of vocabulary': ('teacher_topk_ids', np.full((4, 2), VOCABULARY), ''),
    'negative id': ('teacher_topk_ids', np.full((4, 2), -100), ''),
    'not a number': ('returns', np.full(4, math.nan, np.float32), ''),
}
"""Invalid extra tensors: the name, the value and the suffix of the refused path."""


@pytest.mark.parametrize('case', HOSTILE)
def test_hostile_extra_tensor_is_named(case):
    """An extra tensor that no loss can read is refused, and the path has its name."""
    name, value, suffix = HOSTILE[case]
    path = f'operation.forward_backward.batch.features.features[0].extra_tensors[{name!r}]'
    assert refused_field(forward_backward=training_verb(**{name: value})) == path + suffix


@given(st.binary(max_size=64), st.lists(st.integers(-(2**62), 2**62), max_size=3), st.sampled_from(list(EXTRA_STREAMS)))
def test_arbitrary_bytes_are_refused_without_a_crash(data, shape, name):
    """Arbitrary bytes and shapes of a stream are converted or refused with the stream's name; none causes a crash."""
    verb = training_verb()
    tensor = tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_FLOAT32, shape=shape, data=data)
    verb.batch.features.features[0].extra_tensors[name].CopyFrom(tensor)
    refusals = []
    try:
        converted(forward_backward=verb)
    except InvalidField as error:
        refusals.append(error.field)
    assert all(name in field for field in refusals)


def test_payload_converts_to_the_same_operation():
    """A payload from the journal converts to the same operation with the same fingerprint."""
    message = wire.Operation(adapter_id='a', sequence_number=3, undo=wire.Undo(step_count=1))
    operation = operation_from_proto(message, 'operation', vocabulary_size=VOCABULARY)
    reconverted = operation_from_proto(wire.Operation.FromString(operation.payload), 'x', vocabulary_size=VOCABULARY)
    assert reconverted == operation


def test_parameter_groups_round_trip():
    """A round trip keeps the patterns, learning rates and options of parameter groups."""
    groups = [{'pattern': 'lora_B', 'lr': 0.0}, {'pattern': 'layers.0', 'weight_decay': 0.1, 'betas': [0.9, 0.95]}]
    config = TrainingConfig(
        optimizer=Component(name='AdamW', options={'lr': 0.01, 'groups': groups}),
        loss=LossChoice(name='GRPOLoss', options={'epsilon': 0.2}),
    )
    assert training_config_from_proto(training_config_to_proto(config), 'c') == config


@pytest.mark.parametrize(
    ('group', 'field'),
    [
        ({'learning_rate': 0.1}, 'pattern'),
        ({'pattern': 'x'}, 'options'),
        ({'pattern': 'x', 'learning_rate': -1.0}, 'learning_rate'),
        ({'pattern': 'x', 'learning_rate': math.nan}, 'learning_rate'),
        ({'pattern': 'x', 'options': {'lr': 1.0}}, 'options.lr'),
        ({'pattern': 'x', 'options': {'pattern': 'y'}}, 'options.pattern'),
    ],
)
def test_malformed_group_is_named(group, field):
    """A group without effect or with a repeated setting is refused, and the path has its index."""
    config = {'optimizer': {'groups': [{'pattern': 'good', 'learning_rate': 0.1}, group]}}
    verb = wire.Configure(training_config=config)
    assert refused_field(configure=verb) == f'operation.configure.training_config.optimizer.groups[1].{field}'


def test_groups_inside_the_options_are_refused():
    """Groups inside the options are refused, because they would bypass validation."""
    config = {'optimizer': {'options': {'groups': []}}}
    assert refused_field(configure=wire.Configure(training_config=config)).endswith('optimizer.options.groups')


def test_health_and_receipt_are_converted():
    """The layer health, receipt and warnings of a step are converted; an absent gradient norm stays unset."""
    layer = LayerHealth(
        path='q', grad_norm=1.0, weight_norm=2.0, relative_update=0.5, non_finite_location='lora_A[0, 1]'
    )
    step = StepResult(is_applied=False, learning_rate=0.1, step_count=3, grad_norm=None, layers=(layer,))
    receipt = outcome.Receipt(pass_count=2, pass_adapter_count=5)
    message = result_to_proto(
        outcome.OperationResult(adapter_id='a', sequence_number=1, outcome=step, receipt=receipt, warnings=('w',))
    )
    assert not message.step.HasField('grad_norm')
    health = message.step.layers[0]
    assert (health.path, health.relative_update, health.non_finite_location) == ('q', 0.5, 'lora_A[0, 1]')
    assert (message.receipt.pass_count, message.receipt.pass_adapter_count) == (2, 5)
    assert list(message.warnings) == ['w']


def test_data_cursor_needs_the_optimizer():
    """A data cursor, zero included, is converted; a negative cursor, or a cursor without the optimizer, is refused."""
    for consumed in (0, 2**62):
        saved = converted(save=wire.Save(name='a', is_optimizer_included=True, consumed_train_samples=consumed))
        assert saved.consumed_train_samples == consumed
    assert converted(save=wire.Save(name='a', is_optimizer_included=True)).consumed_train_samples is None
    alone, below = {'consumed_train_samples': 0}, {'is_optimizer_included': True, 'consumed_train_samples': -1}
    for fields in (alone, below):
        assert refused_field(save=wire.Save(name='a', **fields)) == 'operation.save.consumed_train_samples'


def test_training_and_evaluation_metrics_are_separate():
    """A round trip keeps training and evaluation metrics in separate lists; a metric without a name is refused."""
    message = training_config_pb2.TrainingConfig(
        metrics=[{'name': 'LossMetric'}], evaluation_metrics=[{'name': 'Accuracy'}]
    )
    config = training_config_from_proto(message, 'training_config')
    assert ([item.name for item in config.metrics], [item.name for item in config.evaluation_metrics]) == (
        ['LossMetric'],
        ['Accuracy'],
    )
    assert training_config_from_proto(training_config_to_proto(config), 'training_config') == config
    message.evaluation_metrics.add()
    with pytest.raises(InvalidField) as refusal:
        training_config_from_proto(message, 'training_config')
    assert refusal.value.field == 'training_config.evaluation_metrics[1].name'
