"""Rollouts as people follow them: lines of JSON, and callbacks."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from fixtures.chat_templates import ALL
from fixtures.scripted_sampler import ScriptedSampler
from fixtures.tiny_model import build_tiny_tokenizer
from twinkle.rollout import CallbackFailed, EnvStep, MultiTurnRollout, Rollout, rollout_numbers
from twinkle.template import Template

CHATS = [{'messages': [{'role': 'user', 'content': text}]} for text in ('hi', 'ho')]


@pytest.fixture(scope='module')
def template(tmp_path_factory: pytest.TempPathFactory) -> Template:
    """ChatML over the byte tokenizer."""
    folder: Path = tmp_path_factory.mktemp('tokenizer')
    build_tiny_tokenizer(folder)
    (folder / 'chat_template.jinja').write_text(ALL['chatml'])
    return Template(str(folder), max_length=1000)


@pytest.fixture
def sampler(template: Template) -> ScriptedSampler:
    """Says yes to one chat and no to the other."""
    return ScriptedSampler(template, lambda prompt, _: 'yes' if 'hi' in prompt else 'no')


def said_yes(rollout: Rollout) -> bool:
    """Return whether the model said yes."""
    return rollout.messages[-1]['content'] == 'yes'


def test_each_rollout_is_a_line_that_says_all_of_it(sampler: ScriptedSampler, tmp_path: Path) -> None:
    """In order, call after call, in a folder that was not there; with the tokens that would be trained on."""
    folder = tmp_path / 'deep' / 'traces'
    rollout = MultiTurnRollout(sampler, trace_dir=folder, success_callback=said_yes, num_samples=2)
    results = [*rollout(CHATS, seed=1), *rollout(CHATS[0], seed=2)]
    lines = [json.loads(line) for line in (folder / 'rollouts.jsonl').read_text().splitlines()]
    places = [(line['call_index'], line['trajectory_index'], line['sample_index']) for line in lines]
    assert places == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1)]
    for line, result in zip(lines, results, strict=True):
        assert line['messages'] == result.messages
        assert line['input_ids'] == [int(token) for token in result.feature['input_ids']]
        assert line['facts'] == result.facts == {'success': float(said_yes(result))}
        assert (line['end_reason'], line['turn_count'], line['reward']) == ('done', 1, 0.0)
        assert line['version_spans'] == [
            [span.version, span.begin_token, span.end_token] for span in result.version_spans
        ]
    assert rollout_numbers(results[:4])['rollout/facts/success'] == 0.5


def test_a_callback_sees_each_rollout_in_order(sampler: ScriptedSampler) -> None:
    """The very rollouts that are returned."""
    seen: list[Rollout] = []
    rollout = MultiTurnRollout(sampler, trace_callback=seen.append, success_callback=said_yes)
    results = rollout(CHATS, seed=1)
    assert all(one is other for one, other in zip(seen, results, strict=True))


@pytest.mark.parametrize('name', ['trace_callback', 'success_callback'])
def test_a_callback_that_raises_is_named(sampler: ScriptedSampler, tmp_path: Path, name: str) -> None:
    """With its own error as the cause; rollouts before it are written, and an interrupt passes as it is."""
    failures: list[BaseException] = [LookupError('no'), KeyboardInterrupt()]

    def fail(rollout: Rollout) -> None:
        if not said_yes(rollout):
            raise failures.pop(0)

    rollout = MultiTurnRollout(sampler, trace_dir=tmp_path, **{name: fail})
    with pytest.raises(CallbackFailed) as caught:
        rollout(CHATS, seed=1)
    assert caught.value.name == name
    assert isinstance(caught.value.__cause__, LookupError)
    assert pickle.loads(pickle.dumps(caught.value)).name == name
    assert len((tmp_path / 'rollouts.jsonl').read_text().splitlines()) == (2 if name == 'trace_callback' else 1)
    with pytest.raises(KeyboardInterrupt):
        rollout(CHATS, seed=1)
    lines = [json.loads(line) for line in (tmp_path / 'rollouts.jsonl').read_text().splitlines()]
    assert {line['call_index'] for line in lines} == {0, 1}


def test_what_cannot_be_followed_is_refused_first(sampler: ScriptedSampler, tmp_path: Path) -> None:
    """A file for a folder, and callbacks that are none, before anything is drawn."""
    (tmp_path / 'file').write_text('')
    refused: list[dict[str, Any]] = [
        {'trace_dir': tmp_path / 'file'}, {'trace_callback': 'print'}, {'success_callback': 1},
    ]  # fmt: skip
    for options in refused:
        with pytest.raises(ValueError, match=next(iter(options))):
            MultiTurnRollout(sampler, **options)
    assert not sampler.prompts


def test_a_fact_of_the_world_is_not_overwritten(sampler: ScriptedSampler) -> None:
    """A world that reports its own success, and a callback that does, are one too many."""

    class Knowing:
        """Ends at once, and says that it went well."""

        def reset(self, trajectory: Any, *, seed: int | None) -> Any:
            """Begin as told."""
            return trajectory

        def step(self, message: Any, *, is_last: bool) -> EnvStep:
            """End."""
            return EnvStep(is_done=True, facts={'success': 1.0})

        def close(self) -> None:
            """Hold nothing."""

    with pytest.raises(ValueError, match='success'):
        MultiTurnRollout(sampler, env=Knowing, success_callback=said_yes)(CHATS, seed=1)
