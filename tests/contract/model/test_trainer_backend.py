"""Contract tests of trainers, for the local engine and the fake."""

import re
from dataclasses import replace

import numpy as np
import pytest

from fixtures.model_service import draw_example
from fixtures.trainer_batches import (
    BATCHES,
    FULLY_MASKED,
    LORA,
    assert_same_forward,
    parts_of,
    run_to_end,
    train_alone,
)
from twinkle.data_format import ForwardResult, LoraConfig, StepResult
from twinkle_services.kit.errors import AdapterNotFound, DomainError, InvalidField
from twinkle_services.model.domain.engine import AdapterState, BatchPart, VerbRun
from twinkle_services.model.domain.errors import AdapterNotReady, ReplicaLeased
from twinkle_services.model.domain.operation import (
    Backward,
    CalculateMetric,
    ClipGradAndStep,
    ClipGradNorm,
    Configure,
    Forward,
    ForwardBackward,
    ForwardOnly,
    Step,
    ZeroGrad,
)
from twinkle_services.model.domain.result import LoadResult, MetricResult
from twinkle_services.model.domain.training_config import Component, TrainingConfig


async def test_facts_name_one_trainable_model(backend):
    """The facts describe one trainable base model, with its vocabulary and context sizes, and list the losses."""
    (model,) = backend.facts().base_models
    assert model.is_trainable
    assert (model.vocabulary_size, model.context_tokens) == (320, 512)
    assert 'CrossEntropyLoss' in backend.facts().components['loss']


async def test_an_adapter_is_described_with_every_default(backend):
    """The description contains the seed, optimizer, loss and accumulation in use."""
    description = await backend.create_adapter('a', LoraConfig(r=2), TrainingConfig())
    assert description.lora_config.seed is not None
    assert description.training_config.optimizer.name == 'AdamW'
    assert (description.training_config.loss.name, description.training_config.loss.is_mean) == (
        'CrossEntropyLoss',
        False,
    )
    assert description.training_config.gradient_accumulation_steps == 1
    assert description.parameter_count > 0


async def test_deleting_an_unknown_adapter_is_not_an_error(backend):
    """Deleting an unknown adapter has no effect and raises no error."""
    await backend.delete_adapter('unknown')
    await backend.create_adapter('a', LoraConfig(r=2), TrainingConfig())
    await backend.delete_adapter('a')
    await backend.delete_adapter('a')


async def test_results_are_in_the_order_of_the_batch(backend):
    """Each example gets its own log-probabilities, in order, and steps are counted."""
    await backend.create_adapter('a', LoraConfig(r=2), TrainingConfig())
    features = [draw_example(8), draw_example(5, 1)]
    for verb in (ForwardOnly(features=features), ForwardBackward(features=features)):
        outcome = (await backend.run('a', verb)).outcome
        assert isinstance(outcome, ForwardResult)
        assert [len(values) for values in outcome.logps] == [8, 5]
    run = await backend.run('a', ClipGradAndStep())
    assert isinstance(run.outcome, StepResult)
    assert (run.step_count, run.outcome.step_count, run.outcome.is_applied) == (1, 1, True)


async def test_exported_state_can_be_imported(backend):
    """Importing a state together with the trainer's state restores the weights and the step count."""
    await backend.create_adapter('a', LoraConfig(r=2, seed=1), TrainingConfig())
    await backend.run('a', ForwardBackward(features=[draw_example()]))
    await backend.run('a', ClipGradAndStep())
    whole = await backend.export_state('a', is_trainer_included=True)
    weights = await backend.export_state('a', is_trainer_included=False)
    assert (whole.step_count, bool(whole.trainer), bool(weights.trainer)) == (1, True, False)
    assert whole.adapter == weights.adapter
    await backend.create_adapter('b', LoraConfig(r=2, seed=1), TrainingConfig())
    run = await backend.import_state('b', whole, is_trainer_included=True)
    assert run.step_count == 1
    assert (await backend.export_state('b', is_trainer_included=False)).adapter == whole.adapter


async def test_data_cursor_is_restored_with_the_trainer_state(backend):
    """A saved data cursor is returned only if the trainer's state is loaded."""
    await backend.create_adapter('a', LoraConfig(r=2, seed=1), TrainingConfig(gradient_accumulation_steps=2))
    await backend.create_adapter('b', LoraConfig(r=2, seed=1), TrainingConfig())
    for consumed in (None, 0, 7):
        state = await backend.export_state('a', is_trainer_included=True, consumed_train_samples=consumed)
        loaded = (await backend.import_state('b', state, is_trainer_included=True)).outcome
        assert loaded == LoadResult(step_count=0, consumed_train_samples=consumed, gradient_accumulation_steps=2)
        weights = (await backend.import_state('b', state, is_trainer_included=False)).outcome
        assert weights == LoadResult(step_count=0)


async def test_loading_drops_a_pending_forward(backend):
    """Loading drops a pending Forward: Backward is then refused, and a snapshot is possible again."""
    for name in ('a', 'b'):
        await backend.create_adapter(name, LoraConfig(r=2, seed=1), TrainingConfig())
    for is_trainer_included in (False, True):
        state = await backend.export_state('a', is_trainer_included=True)
        await backend.run('b', Forward(features=[draw_example()]))
        await backend.import_state('b', state, is_trainer_included=is_trainer_included)
        with pytest.raises(AdapterNotReady):
            await backend.run('b', Backward())
        assert await backend.snapshot('b') is not None


async def test_batched_results_equal_separate_results_bitwise(backend):
    """Losses, log-probabilities, gradients and weights do not depend on the other adapters of a pass."""
    alone = {}
    for adapter_id in BATCHES:
        alone[adapter_id] = await train_alone(backend, adapter_id)
        await backend.delete_adapter(adapter_id)
        await backend.create_adapter(adapter_id, LORA[adapter_id], TrainingConfig())
    order = ('c', 'a', 'b')
    trained = await run_to_end(backend, parts_of(ForwardBackward, *order))
    evaluated = await run_to_end(backend, parts_of(ForwardOnly, *order))
    for adapter_id, (runs, state) in alone.items():
        assert_same_forward(trained[adapter_id], runs[0])
        assert_same_forward(evaluated[adapter_id], runs[1])
        await backend.run(adapter_id, ClipGradAndStep())
        assert await backend.export_state(adapter_id, is_trainer_included=True) == state


async def test_result_contains_the_number_of_adapters_in_its_passes(backend):
    """Each result contains the number of its passes and the number of adapters in these passes."""
    for adapter_id in ('a', 'b'):
        await backend.create_adapter(adapter_id, LORA[adapter_id], TrainingConfig())
    for run in (await run_to_end(backend, parts_of(ForwardBackward, 'a', 'b'))).values():
        assert run.pass_count >= 1
        assert run.pass_adapter_count == 2
    alone = await backend.run('a', ForwardBackward(features=BATCHES['a']))
    assert alone.pass_adapter_count == 1


async def test_a_failing_part_does_not_affect_the_others(backend):
    """Errors are returned in order, and do not affect the results and states of other parts."""
    _, expected = await train_alone(backend, 'a')
    await backend.delete_adapter('a')
    for adapter_id in ('a', 'b'):
        await backend.create_adapter(adapter_id, LORA[adapter_id], TrainingConfig())
    before = await backend.export_state('b', is_trainer_included=True)
    parts = [
        BatchPart(adapter_id='unknown', verb=ForwardBackward(features=BATCHES['a'])),
        BatchPart(adapter_id='b', verb=ForwardBackward(features=FULLY_MASKED)),
        *parts_of(ForwardBackward, 'a'),
    ]
    unknown, refused, good = await backend.run_pass(parts)
    assert isinstance(unknown, AdapterNotFound)
    assert isinstance(refused, InvalidField)
    assert 'labels' in refused.field
    assert isinstance(good, VerbRun)
    assert await backend.export_state('b', is_trainer_included=True) == before
    await backend.run('a', ForwardOnly(features=BATCHES['a']))
    await backend.run('a', ClipGradAndStep())
    assert await backend.export_state('a', is_trainer_included=True) == expected


async def test_run_pass_returns_the_errors_of_run(backend):
    """`run` raises an error that `run_pass` returns."""
    await backend.create_adapter('b', LORA['b'], TrainingConfig())
    verb = ForwardBackward(features=FULLY_MASKED)
    with pytest.raises(DomainError) as caught:
        await backend.run('b', verb)
    (returned,) = await backend.run_pass([BatchPart(adapter_id='b', verb=verb)])
    assert (type(returned), str(returned)) == (type(caught.value), str(caught.value))


CONFIG = TrainingConfig(optimizer=Component(name='AdamW', options={'lr': 0.05}))
REMAINING_VERBS = (
    ForwardBackward(features=BATCHES['b']),
    CalculateMetric(),
    ClipGradNorm(max_grad_norm=0.1),
    Step(),
    ZeroGrad(),
    ForwardBackward(features=BATCHES['c']),
    ClipGradAndStep(),
    CalculateMetric(),
)


def without_times(state):
    """Return the configuration and tensors of a state, without elapsed times."""
    tensors = {name: bytes(tensor.data) for name, tensor in {**state.adapter, **state.trainer}.items()}
    return state.lora_config, {name: re.sub(rb'"elapsed_seconds": [^,}]*', b'', data) for name, data in tensors.items()}


async def run_all(backend, adapter_id, verbs):
    """Run verbs; return their results without times, in a form for bitwise comparison."""
    results = []
    for verb in verbs:
        outcome = (await backend.run(adapter_id, verb)).outcome
        arrays = [values.tobytes() for values in getattr(outcome, 'logps', ())]
        if isinstance(outcome, ForwardResult):
            outcome = replace(outcome, logps=())
        if isinstance(outcome, MetricResult):
            outcome = {name: value for name, value in outcome.values.items() if 'second' not in name}
        results.append((repr(outcome), arrays))
    return results


async def test_restored_adapter_continues_bitwise(backend):
    """A restored adapter has bitwise the same later results and state, including its gradient and its dropout."""
    await backend.create_adapter('a', LORA['b'], CONFIG)
    await run_all(backend, 'a', [ForwardBackward(features=BATCHES['a']), ClipGradAndStep()])
    await run_all(backend, 'a', [ForwardBackward(features=BATCHES['a'])])
    snapshot = await backend.snapshot('a')
    assert snapshot.step_count == 1
    expected, final = await run_all(backend, 'a', REMAINING_VERBS), without_times(await backend.snapshot('a'))
    for restored_id in ('a', 'another'):
        run = await backend.restore_adapter(restored_id, snapshot)
        assert run.step_count == 1
        assert run.training_config.optimizer.options['lr'] == 0.05
        assert without_times(await backend.snapshot(restored_id)) == without_times(snapshot)
        assert await run_all(backend, restored_id, REMAINING_VERBS) == expected
        assert without_times(await backend.snapshot(restored_id)) == final


async def test_a_snapshot_is_a_copy(backend):
    """Further training does not change a snapshot."""
    await backend.create_adapter('a', LORA['a'], CONFIG)
    await run_all(backend, 'a', [ForwardBackward(features=BATCHES['a'])])
    snapshot = await backend.snapshot('a')
    original = {name: bytes(tensor.data) for name, tensor in {**snapshot.adapter, **snapshot.trainer}.items()}
    await run_all(backend, 'a', [ClipGradAndStep(), ForwardBackward(features=BATCHES['a'])])
    assert {name: bytes(tensor.data) for name, tensor in {**snapshot.adapter, **snapshot.trainer}.items()} == original


async def test_no_snapshot_exists_between_forward_and_backward(backend):
    """`snapshot` returns None between Forward and Backward."""
    await backend.create_adapter('a', LORA['a'], CONFIG)
    await backend.run('a', Forward(features=BATCHES['a']))
    assert await backend.snapshot('a') is None
    gradients = [np.ones(len(feature['input_ids']), np.float32) for feature in BATCHES['a']]
    await backend.run('a', Backward(logprob_gradients=gradients))
    assert await backend.snapshot('a') is not None


async def test_a_malformed_snapshot_changes_nothing(backend):
    """A malformed snapshot does not replace or create an adapter."""
    await backend.create_adapter('a', LORA['a'], CONFIG)
    snapshot = await backend.snapshot('a')
    broken = AdapterState(lora_config=snapshot.lora_config, adapter=snapshot.adapter)
    for adapter_id in ('a', 'new'):
        with pytest.raises(InvalidField):
            await backend.restore_adapter(adapter_id, broken)
    assert without_times(await backend.snapshot('a')) == without_times(snapshot)
    with pytest.raises(AdapterNotFound):
        await backend.run('new', ForwardOnly(features=BATCHES['a']))


async def test_configuration_change_is_reported_and_saved(backend):
    """A configuration change leaves other settings unchanged and is part of the next snapshot."""
    await backend.create_adapter('a', LORA['a'], CONFIG)
    run = await backend.run('a', Configure(training_config=TrainingConfig(gradient_accumulation_steps=2)))
    assert run.training_config.gradient_accumulation_steps == 2
    assert run.training_config.optimizer.options['lr'] == 0.05
    restored = await backend.restore_adapter('b', await backend.snapshot('a'))
    assert restored.training_config.gradient_accumulation_steps == 2


async def test_full_parameter_adapter_excludes_all_others(backend):
    """A full-parameter adapter excludes all others, and deleting it restores the base model."""
    await backend.create_adapter('a', LORA['a'], CONFIG)
    before = await run_all(backend, 'a', [ForwardOnly(features=BATCHES['a'])])
    with pytest.raises(ReplicaLeased):
        await backend.create_adapter('full', LoraConfig(), CONFIG, full_parameters=())
    await backend.delete_adapter('a')
    description = await backend.create_adapter('full', LoraConfig(), CONFIG, full_parameters=())
    assert description.parameter_count > 0
    with pytest.raises(ReplicaLeased):
        await backend.create_adapter('a', LORA['a'], CONFIG)
    await run_all(backend, 'full', [ForwardBackward(features=BATCHES['a'])])
    snapshot = await backend.snapshot('full')
    assert snapshot.full_parameters == ()
    expected = await run_all(backend, 'full', REMAINING_VERBS)
    await backend.restore_adapter('full', snapshot)
    assert await run_all(backend, 'full', REMAINING_VERBS) == expected
    await backend.delete_adapter('full')
    await backend.create_adapter('a', LORA['a'], CONFIG)
    assert await run_all(backend, 'a', [ForwardOnly(features=BATCHES['a'])]) == before
