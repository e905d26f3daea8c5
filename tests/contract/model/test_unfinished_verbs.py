"""Contract tests of verbs that trainers run in several passes, for the local engine and the fake."""

import pytest

from fixtures.model_service import draw_example
from fixtures.trainer_batches import FULLY_MASKED, LORA, assert_same_forward, train, train_alone
from twinkle_services.kit.errors import InvalidField
from twinkle_services.model.domain.engine import BatchPart, UnfinishedVerb
from twinkle_services.model.domain.operation import ForwardBackward, ForwardOnly
from twinkle_services.model.domain.training_config import TrainingConfig

LONG = [draw_example(length, seed=length) for length in (30, 50, 31, 64, 40, 20, 60, 55)]
"""A batch that takes several passes on each backend."""


@pytest.mark.parametrize('verb_type', [ForwardBackward, ForwardOnly])
async def test_other_calls_run_between_the_passes_of_a_verb(backend, verb_type):
    """Other adapters are created, trained, saved and deleted between a verb's passes, and no result changes."""
    await backend.create_adapter('b', LORA['b'], TrainingConfig())
    expected = await backend.run('b', verb_type(features=LONG))
    assert expected.pass_count > 1
    expected_state = await backend.export_state('b', is_trainer_included=True)
    others, other_state = await train_alone(backend, 'a')
    for adapter_id in ('a', 'b'):
        await backend.delete_adapter(adapter_id)
    await backend.create_adapter('b', LORA['b'], TrainingConfig())
    (outcome,) = await backend.run_pass([BatchPart(adapter_id='b', verb=verb_type(features=LONG))])
    counts = []
    while isinstance(outcome, UnfinishedVerb):
        counts.append(outcome.remaining_token_count)
        runs, state = await train_alone(backend, 'a')
        assert state == other_state
        for run, other in zip(runs[:2], others[:2], strict=True):
            assert_same_forward(run, other)
        await backend.delete_adapter('a')
        (outcome,) = await backend.run_pass([BatchPart(adapter_id='b', verb=None)])
    assert sorted(counts, reverse=True) == counts
    assert 0 < counts[-1] < sum(len(feature['input_ids']) for feature in LONG)
    assert_same_forward(outcome, expected)
    assert await backend.export_state('b', is_trainer_included=True) == expected_state


async def test_an_abandoned_verb_changes_nothing(backend):
    """An adapter whose verb was abandoned after a pass has its previous state, including its random state."""
    expected, expected_state = await train_alone(backend, 'b')
    await backend.delete_adapter('b')
    await backend.create_adapter('b', LORA['b'], TrainingConfig())
    (outcome,) = await backend.run_pass([BatchPart(adapter_id='b', verb=ForwardBackward(features=LONG))])
    assert isinstance(outcome, UnfinishedVerb)
    await backend.abandon('b')
    await backend.abandon('b')
    runs, state = await train(backend, 'b')
    for run, other in zip(runs[:2], expected[:2], strict=True):
        assert_same_forward(run, other)
    assert state == expected_state


async def test_a_failing_pass_ends_its_verb_only(backend):
    """A refused verb does not affect an unfinished verb in the same pass."""
    for adapter_id in ('a', 'b'):
        await backend.create_adapter(adapter_id, LORA[adapter_id], TrainingConfig())
    (outcome,) = await backend.run_pass([BatchPart(adapter_id='b', verb=ForwardBackward(features=LONG))])
    assert isinstance(outcome, UnfinishedVerb)
    refused, outcome = await backend.run_pass(
        [
            BatchPart(adapter_id='a', verb=ForwardBackward(features=FULLY_MASKED)),
            BatchPart(adapter_id='b', verb=None),
        ]
    )
    assert isinstance(refused, InvalidField)
    assert isinstance(outcome, UnfinishedVerb)
