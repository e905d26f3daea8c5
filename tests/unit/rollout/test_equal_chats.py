"""Unit tests of a seeded call with several chats whose prompts are equal."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fixtures.chat_templates import ALL
from fixtures.scripted_sampler import ScriptedSampler
from fixtures.tiny_model import build_tiny_tokenizer
from twinkle.rollout import EnvStep, MultiTurnRollout
from twinkle.template import Template

CHAT = {'messages': [{'role': 'user', 'content': 'hi'}], 'user_data': [('answer', '"42"')]}


@pytest.fixture(scope='module')
def template(tmp_path_factory: pytest.TempPathFactory) -> Template:
    """ChatML over the byte tokenizer."""
    folder: Path = tmp_path_factory.mktemp('tokenizer')
    build_tiny_tokenizer(folder)
    (folder / 'chat_template.jinja').write_text(ALL['chatml'])
    return Template(str(folder), max_length=100_000)


class TwoAnswers:
    """Environment that answers two turns and then ends the chat."""

    def reset(self, trajectory: Any, *, seed: int | None) -> Any:
        """Return the trajectory unchanged."""
        del seed
        self.remaining = 2
        return trajectory

    def step(self, message: Any, *, is_last: bool) -> EnvStep:
        """Request another turn twice, then end the chat."""
        del message, is_last
        self.remaining -= 1
        return EnvStep(messages=[{'role': 'user', 'content': 'more'}], is_done=self.remaining < 0)

    def close(self) -> None:
        """Release nothing."""


def test_equal_chats_get_different_samples(template):
    """Equal chats in one seeded call get different samples in every turn."""

    def run(chats: list[Any], count: int) -> tuple[list[Any], ScriptedSampler]:
        sampler = ScriptedSampler(template, lambda prompt, seed: f'{seed}')
        rollouts = MultiTurnRollout(sampler, env=TwoAnswers)(chats, num_samples=count, seed=5)
        return [[message['content'] for message in one.messages] for one in rollouts], sampler

    chats = [{**CHAT, 'user_data': [('answer', str(index))]} for index in range(4)]
    all_contents, sampler = run(chats, 1)
    for turn in (1, 3, 5):
        assert len({contents[turn] for contents in all_contents}) == 4
    assert [params.num_samples for params in sampler.params[:2]] == [4, 1]
    assert run([CHAT, CHAT], 2)[0] == run([CHAT], 4)[0] == all_contents
    other = {'messages': [{'role': 'user', 'content': 'you'}]}
    assert run([other, CHAT], 1)[0][1] == run([CHAT], 1)[0][0]


def test_equal_tokens_with_different_images_are_separate_requests(template):
    """Chats with equal tokens and different images are sent as separate requests with different seeds."""

    class ImageTemplate:
        def __getattr__(self, name: str) -> Any:
            return getattr(template, name)

        def encode(self, trajectory: Any, *, add_generation_prompt: bool = False) -> Any:
            """Return the feature with pixel values, like a template for images."""
            feature = template.encode(trajectory, add_generation_prompt=add_generation_prompt)
            return {**feature, 'pixel_values': np.asarray(trajectory['pixels'])}

    sampler = ScriptedSampler(template, lambda prompt, seed: f'{seed}')
    chats = [{**CHAT, 'pixels': [[number]]} for number in (0.0, 1.0)]
    rollouts = MultiTurnRollout(sampler, ImageTemplate())(chats, num_samples=2, seed=5)
    assert [params.num_samples for params in sampler.params] == [2, 2]
    assert len({one.messages[-1]['content'] for one in rollouts}) == 4
    assert [float(one.feature['pixel_values'][0][0]) for one in rollouts] == [0, 0, 1, 1]
