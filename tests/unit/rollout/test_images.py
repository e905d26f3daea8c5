"""Chats that begin with an image and grow turn by turn."""

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


class Asking:
    """Asks once more."""

    def reset(self, trajectory: Any, *, seed: int | None) -> Any:
        """Begin as told."""
        del seed
        self.left = 1
        return trajectory

    def step(self, message: Any, *, is_last: bool) -> EnvStep:
        """Ask again."""
        del message, is_last
        self.left -= 1
        return EnvStep(messages=[{'role': 'user', 'content': 'more'}], is_done=self.left < 0)

    def close(self) -> None:
        """Give nothing back."""


def test_turns_behind_an_image_are_trained_on_as_they_were_drawn(folder):
    """Pixels stay with the chat, positions go on behind the image, and the trainer's log-probabilities agree."""
    sampler = TorchSampler(str(folder))
    # Most tokens end a turn, which a model of random weights would seldom do by itself.
    params = SamplingParams(max_tokens=60, temperature=1.0, logprobs=0, stop=list(range(7, 200)))
    (rollout,) = MultiTurnRollout(sampler, env=Asking, sampling_params=params)([CHAT], seed=3)
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
