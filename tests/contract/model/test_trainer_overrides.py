"""Contract tests of trainers: a loss for a single batch and optimizer options for a single step."""

import numpy as np
import pytest

from fixtures.model_service import draw_example
from twinkle.data_format import LoraConfig
from twinkle_services.kit.errors import InvalidField, UnknownComponent
from twinkle_services.model.domain.engine import BatchPart, VerbRun
from twinkle_services.model.domain.operation import ClipGradAndStep, ForwardBackward, ForwardOnly, Step
from twinkle_services.model.domain.training_config import LossChoice, TrainingConfig

BATCHES = {'a': [draw_example(20, 1), draw_example(9, 2)], 'b': [draw_example(17, 3)]}
LORA = {'a': LoraConfig(r=2, seed=1), 'b': LoraConfig(r=4, seed=2, lora_dropout=0.5)}


def assert_same_forward(actual, expected):
    """Assert that two results are bitwise equal."""
    assert (actual.outcome.loss, actual.outcome.num_tokens) == (expected.outcome.loss, expected.outcome.num_tokens)
    for values, expected_values in zip(actual.outcome.logps, expected.outcome.logps, strict=True):
        np.testing.assert_array_equal(values, expected_values)


BATCH_LOSS = LossChoice(name='CrossEntropyLoss', is_mean=False)


async def test_batch_loss_equals_the_same_loss_in_the_configuration(backend):
    """A loss that is passed with a batch has the same effect as the same loss in the adapter's configuration."""
    for name in ('a', 'b'):
        await backend.create_adapter(name, LoraConfig(r=2, seed=1), TrainingConfig(loss=BATCH_LOSS))
    plain = await backend.run('a', ForwardBackward(features=BATCHES['a']))
    overridden = await backend.run('b', ForwardBackward(features=BATCHES['a'], loss=BATCH_LOSS))
    assert_same_forward(overridden, plain)
    evaluated = [await backend.run(name, ForwardOnly(features=BATCHES['b'], loss=BATCH_LOSS)) for name in ('a', 'b')]
    assert_same_forward(evaluated[0], evaluated[1])
    states = [await backend.export_state(name, is_trainer_included=True) for name in ('a', 'b')]
    assert states[0] == states[1]


@pytest.mark.parametrize(
    ('loss', 'error', 'field'),
    [
        (LossChoice(name='UnknownLoss'), UnknownComponent, 'loss.name'),
        (LossChoice(name='CrossEntropyLoss', options={'softness': 1}), InvalidField, 'loss.options'),
    ],
    ids=['name', 'option'],
)
@pytest.mark.parametrize('verb', [ForwardBackward, ForwardOnly])
async def test_an_unknown_loss_of_a_batch_changes_nothing(backend, verb, loss, error, field):
    """The error for a batch's unknown loss or loss option names the field, and other parts are not affected."""
    for name in ('a', 'b'):
        await backend.create_adapter(name, LORA[name], TrainingConfig())
    before = await backend.export_state('a', is_trainer_included=True)
    parts = [
        BatchPart(adapter_id='a', verb=verb(features=BATCHES['a'], loss=loss)),
        BatchPart(adapter_id='b', verb=verb(features=BATCHES['b'])),
    ]
    refused, good = await backend.run_pass(parts)
    assert isinstance(good, VerbRun)
    assert isinstance(refused, error)
    assert refused.field == field
    assert await backend.export_state('a', is_trainer_included=True) == before


async def test_options_of_a_step_do_not_change_the_defaults(backend):
    """Options of one step change the trained weights but not the adapter's configuration."""
    weights = {}
    for name, options in (('a', {}), ('b', {'weight_decay': 0.5, 'betas': [0.9, 0.95], 'eps': 1e-12})):
        await backend.create_adapter(name, LoraConfig(r=2, seed=1), TrainingConfig())
        for step_options in (options, {}):
            await backend.run(name, ForwardBackward(features=BATCHES['a']))
            step = ClipGradAndStep(max_grad_norm=float('inf'), learning_rate=0.5, optimizer_options=step_options)
            run = await backend.run(name, step)
            assert run.outcome.grad_norm > 0
        state = await backend.export_state(name, is_trainer_included=False)
        weights[name] = state.adapter
    assert weights['a'] != weights['b']
    described = [await backend.create_adapter(name, LoraConfig(r=2, seed=1), TrainingConfig()) for name in ('c', 'd')]
    assert described[0].training_config == described[1].training_config


@pytest.mark.parametrize('options', [{'amsgrad': True}, {'momentum': 0.9}, {'groups': []}])
@pytest.mark.parametrize('verb', [Step, ClipGradAndStep])
async def test_unsupported_options_of_a_step_are_refused(backend, verb, options):
    """Unknown options, and options that define the optimizer's state, are refused."""
    await backend.create_adapter('a', LoraConfig(r=2, seed=1), TrainingConfig())
    await backend.run('a', ForwardBackward(features=BATCHES['a']))
    before = await backend.export_state('a', is_trainer_included=True)
    with pytest.raises(InvalidField) as refusal:
        await backend.run('a', verb(optimizer_options=options))
    assert refusal.value.field == 'optimizer_options'
    assert await backend.export_state('a', is_trainer_included=True) == before


async def test_snapshot_does_not_contain_the_options_of_a_step(backend):
    """The options of a single step are not part of a snapshot."""
    for name in ('a', 'b'):
        await backend.create_adapter(name, LoraConfig(r=2, seed=1), TrainingConfig())
    for name in ('a', 'b'):
        await backend.run(name, ForwardBackward(features=BATCHES['a'], loss=BATCH_LOSS))
        await backend.run(name, ClipGradAndStep(learning_rate=0.1, optimizer_options={'weight_decay': 0.1}))
        if name == 'b':
            await backend.restore_adapter('b', await backend.snapshot('b'))
        await backend.run(name, ForwardBackward(features=BATCHES['a']))
        await backend.run(name, ClipGradAndStep())
    states = [await backend.export_state(name, is_trainer_included=True) for name in ('a', 'b')]
    assert states[0] == states[1]
