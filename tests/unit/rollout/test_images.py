"""Unit tests of multi-turn chats that start with an image."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fixtures.tiny_vision import build_tiny_vision, picture
from twinkle.data_format import LoraConfig, SamplingParams
from twinkle.model import TransformersModel
from twinkle.rollout import EnvStep, MultiTurnRollout
from twinkle.sampler import TorchSampler

CHAT = {'messages': [{'role': 'user', 'content': '<image>Which colour?'}], 'images': [picture(96, 32)]}


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny vision-language model."""
    return build_tiny_vision(tmp_path_factory.mktemp('vision') / 'tiny')


class OneAnswer:
    """Environment that answers one turn and then ends the chat."""

    def reset(self, trajectory: Any, *, seed: int | None) -> Any:
        """Return the trajectory unchanged."""
        del seed
        self.remaining = 1
        return trajectory

    def step(self, message: Any, *, is_last: bool) -> EnvStep:
        """Request another turn once, then end the chat."""
        del message, is_last
        self.remaining -= 1
        return EnvStep(messages=[{'role': 'user', 'content': 'more'}], is_done=self.remaining < 0)

    def close(self) -> None:
        """Release nothing."""


def test_turns_after_an_image_match_the_trainer(folder):
    """The feature keeps pixels and positions, and the trainer computes the sampler's log-probabilities."""
    sampler = TorchSampler(str(folder))
    # Most tokens are stop tokens, because a random model would rarely generate the end-of-turn token.
    params = SamplingParams(max_tokens=60, temperature=1.0, logprobs=0, stop=list(range(7, 200)))
    (rollout,) = MultiTurnRollout(sampler, env=OneAnswer, sampling_params=params)([CHAT], seed=3)
    feature = rollout.feature
    assert rollout.turn_count == 2
    assert np.asarray(feature['pixel_values']).shape == (48, 384)
    assert np.shape(feature['position_ids']) == (3, len(feature['input_ids']))
    bare = {name: value for name, value in feature.items() if name != 'position_ids'}
    expected = sampler.template.set_mm_position_ids(bare)['position_ids']
    np.testing.assert_array_equal(feature['position_ids'], expected)
    model = TransformersModel(str(folder))
    model.add_adapter_to_model('default', LoraConfig(r=4))
    (logps,) = model.forward_only([feature])['logps']
    np.testing.assert_allclose(logps, feature['old_logps'], atol=1e-5)
