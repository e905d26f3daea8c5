"""What every trainer behind the model service's port does, the fake of the tests included."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fixtures.fake_trainer import FakeTrainer
from fixtures.model_service import draw_example
from services.model.backends.local import LocalBackend
from services.model.domain.operation import ClipGradAndStep, ForwardBackward, ForwardOnly
from services.model.domain.result import ForwardResult, StepResult
from services.model.domain.training_config import TrainingConfig
from services.model.ports import TrainerBackend
from twinkle.data_format import LoraConfig


@pytest.fixture(params=['fake', 'local'])
async def backend(request: pytest.FixtureRequest, tiny_llama_dir: Path) -> AsyncIterator[TrainerBackend]:
    """Each implementation in turn."""
    made = FakeTrainer() if request.param == 'fake' else await LocalBackend.load(str(tiny_llama_dir), thread_count=1)
    yield made
    await made.close()


async def test_facts_name_one_trainable_model(backend):
    """Callers learn what to ask for and how large token ids may be."""
    (model,) = backend.facts().base_models
    assert model.is_trainable
    assert (model.vocabulary_size, model.context_tokens) == (320, 512)
    assert 'CrossEntropyLoss' in backend.facts().components['loss']


async def test_an_adapter_is_described_with_every_default(backend):
    """Seed, optimizer, loss and accumulation are told as they are in use."""
    made = await backend.create_adapter('a', LoraConfig(r=2), TrainingConfig())
    assert made.lora_config.seed is not None
    assert made.training_config.optimizer.name == 'AdamW'
    assert (made.training_config.loss.name, made.training_config.loss.is_mean) == ('CrossEntropyLoss', False)
    assert made.training_config.gradient_accumulation_steps == 1
    assert made.parameter_count > 0


async def test_deleting_what_is_not_there_is_no_error(backend):
    """Clean-up may be repeated."""
    await backend.delete_adapter('ghost')
    await backend.create_adapter('a', LoraConfig(r=2), TrainingConfig())
    await backend.delete_adapter('a')
    await backend.delete_adapter('a')


async def test_verbs_answer_in_the_order_of_the_batch(backend):
    """Each example gets its own log-probabilities; steps are counted."""
    await backend.create_adapter('a', LoraConfig(r=2), TrainingConfig())
    features = [draw_example(8), draw_example(5, 1)]
    for verb in (ForwardOnly(features=features), ForwardBackward(features=features)):
        outcome = (await backend.run('a', verb)).outcome
        assert isinstance(outcome, ForwardResult)
        assert [len(values) for values in outcome.logprobs] == [8, 5]
    run = await backend.run('a', ClipGradAndStep())
    assert isinstance(run.outcome, StepResult)
    assert (run.step_count, run.outcome.step_count, run.outcome.is_applied) == (1, 1, True)


async def test_state_goes_out_and_in(backend):
    """With its trainer's part an adapter goes on counting where it was; without it has none."""
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
