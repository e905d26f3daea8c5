"""What an operator's configuration changes about the base model, in the trainer and in the sampler."""

import pytest

from fixtures.tiny_model import MAX_POSITIONS, build_tiny_model
from services.kit.config import load_config
from services.model.backends.local.loading import LoadOptions, load_engine
from services.model.config import ModelConfig
from services.sampler.backends.torch_engine import TorchEngine, TorchEngineOptions
from twinkle.component import InvalidComponentOptions, UnknownComponent

PATCHES = {'RopeScalingPatch': {'factor': 2.0}}


@pytest.fixture
def folder(tmp_path):
    """Return a tiny model's folder."""
    return str(build_tiny_model(tmp_path / 'model'))


async def test_trainer_and_sampler_serve_the_longer_context(folder):
    """Both load the patched model."""
    assert (
        load_engine(LoadOptions(base_model=folder, patches=PATCHES)).model.max_position_embeddings == 2 * MAX_POSITIONS
    )
    engine = TorchEngine(TorchEngineOptions(base_model='m', folder=folder, patches=PATCHES))
    try:
        assert engine.facts.context_tokens == 2 * MAX_POSITIONS
    finally:
        await engine.close()


@pytest.mark.parametrize(
    ('patches', 'refusal'),
    [({'NoSuchPatch': {}}, UnknownComponent), ({'RopeScalingPatch': {'factor': 0.5}}, InvalidComponentOptions)],
)
def test_a_patch_that_cannot_be_applied_stops_the_start(folder, patches, refusal):
    """Rather than serving another model than was asked for."""
    with pytest.raises(refusal):
        load_engine(LoadOptions(base_model=folder, patches=patches))


def test_patches_can_be_set_from_the_command_line():
    """Options are numbers there, too."""
    arguments = [
        '--set',
        'base_model=m',
        '--set',
        'checkpoint_address=x',
        '--set',
        'patches.RopeScalingPatch.factor=4.0',
    ]
    assert load_config(ModelConfig, arguments).patches == {'RopeScalingPatch': {'factor': 4.0}}
