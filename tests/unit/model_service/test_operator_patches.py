"""Tests of patches of the base model in the trainer and in the sampler."""

import asyncio
from itertools import chain

import pytest

from fixtures import journals
from fixtures.tiny_model import MAX_POSITIONS, build_tiny_model
from twinkle.api.server.v1.server_service_pb2 import Limits
from twinkle.component import InvalidComponentOptions, UnknownComponent
from twinkle_services.kit.config import load_config
from twinkle_services.kit.rpc.server_info import ServerInfoServicer
from twinkle_services.model import replay
from twinkle_services.model.assembly import engine_name
from twinkle_services.model.backends.group.loading import LoadOptions, facts_of, load_engine
from twinkle_services.model.backends.journal.schema import JournalRefused
from twinkle_services.model.config import ModelConfig
from twinkle_services.sampler.__main__ import server_facts
from twinkle_services.sampler.backends.torch_engine import TorchEngine, TorchEngineOptions

PATCHES = {'RopeScalingPatch': {'factor': 2.0}}


@pytest.fixture
def folder(tmp_path):
    """Folder of a tiny model."""
    return str(build_tiny_model(tmp_path / 'model'))


async def test_trainer_and_sampler_serve_the_longer_context(folder):
    """Trainer and sampler both load the patched model with its longer context."""
    assert (
        load_engine(LoadOptions(base_model=folder, patches=PATCHES)).model.max_position_embeddings == 2 * MAX_POSITIONS
    )
    engine = TorchEngine(TorchEngineOptions(base_model='m', folder=folder, patches=PATCHES))
    try:
        assert engine.facts.context_tokens == 2 * MAX_POSITIONS
    finally:
        await engine.close()


async def test_trainer_and_sampler_report_their_patches(folder):
    """Trainer and sampler report the names and options of their patches."""
    options = LoadOptions(base_model=folder, patches=PATCHES)
    trained = facts_of(options, load_engine(options).model)
    engine = TorchEngine(TorchEngineOptions(base_model='m', folder=folder, patches=PATCHES))
    try:
        sampled = server_facts(engine.facts, patches=PATCHES, is_dedicated=False)
    finally:
        await engine.close()
    for facts in (trained, sampled):
        info = ServerInfoServicer('x', facts=lambda facts=facts: facts, methods={}, limits=Limits()).describe()
        (patch,) = info.base_models[0].patches
        assert (patch.name, dict(patch.options)) == ('RopeScalingPatch', {'factor': 2.0})


@pytest.mark.parametrize(
    ('patches', 'refusal'),
    [({'NoSuchPatch': {}}, UnknownComponent), ({'RopeScalingPatch': {'factor': 0.5}}, InvalidComponentOptions)],
)
def test_a_patch_that_cannot_be_applied_stops_the_start(folder, patches, refusal):
    """An unknown patch, or a patch with invalid options, stops the start of the trainer."""
    with pytest.raises(refusal):
        load_engine(LoadOptions(base_model=folder, patches=patches))


def _config(*assignments):
    arguments = [('--set', item) for item in ('base_model=m', 'checkpoint_address=x', *assignments)]
    return load_config(ModelConfig, list(chain.from_iterable(arguments)))


def test_patches_can_be_set_from_the_command_line():
    """Patches can be set on the command line, with numeric options."""
    assert _config('patches.RopeScalingPatch.factor=4.0').patches == {'RopeScalingPatch': {'factor': 4.0}}


async def test_a_journal_of_another_patched_model_is_refused(tmp_path):
    """A journal with adapters of a differently patched model is refused."""
    plain, patched = (
        engine_name(_config(*patches), dtype='float32') for patches in ((), ('patches.RopeScalingPatch.factor=4.0',))
    )
    journal = await journals.open_journal(tmp_path, engine=plain)
    await journals.add(journal, journals.make_adapter())
    await journal.close()
    with pytest.raises(JournalRefused):
        await journals.open_journal(tmp_path, engine=patched)


async def test_the_replay_tool_applies_the_configured_patches(folder, tmp_path, capsys):
    """The replay tool applies the configured patches; for an unknown patch, it prints an error without a traceback."""
    arguments = ['--journal', str(tmp_path), '--set', f'base_model={folder}', '--set', 'checkpoint_address=x']
    assert await asyncio.to_thread(replay.main, [*arguments, '--set', 'patches.NoSuchPatch.factor=2.0']) == 2
    assert 'NoSuchPatch' in capsys.readouterr().out
