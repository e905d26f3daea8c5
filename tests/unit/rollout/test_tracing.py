"""Unit tests of rollout tracing: the JSON Lines file and the callbacks."""

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
    """A sampler that answers yes to one chat and no to the other."""
    return ScriptedSampler(template, lambda prompt, _: 'yes' if 'hi' in prompt else 'no')


def answers_yes(rollout: Rollout) -> bool:
    """Return whether the model answered yes."""
    return rollout.messages[-1]['content'] == 'yes'


def test_each_rollout_is_written_as_a_line(sampler: ScriptedSampler, tmp_path: Path) -> None:
    """The file has one line per rollout of all calls, in order, with its tokens, messages and facts."""
    folder = tmp_path / 'deep' / 'traces'
    rollout = MultiTurnRollout(sampler, trace_dir=folder, success_callback=answers_yes, num_samples=2)
    results = [*rollout(CHATS, seed=1), *rollout(CHATS[0], seed=2)]
    lines = [json.loads(line) for line in (folder / 'rollouts.jsonl').read_text().splitlines()]
    indexes = [(line['call_index'], line['trajectory_index'], line['sample_index']) for line in lines]
    assert indexes == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1)]
    for line, result in zip(lines, results, strict=True):
        assert line['messages'] == result.messages
        assert line['input_ids'] == [int(token) for token in result.feature['input_ids']]
        assert line['facts'] == result.facts == {'success': float(answers_yes(result))}
        assert (line['end_reason'], line['turn_count'], line['reward']) == ('done', 1, 0.0)
        assert line['version_spans'] == [
            [span.version, span.begin_token, span.end_token] for span in result.version_spans
        ]
    assert rollout_numbers(results[:4])['rollout/facts/success'] == 0.5


def test_a_callback_sees_each_rollout_in_order(sampler: ScriptedSampler) -> None:
    """The callback receives the returned rollout objects in order."""
    seen: list[Rollout] = []
    rollout = MultiTurnRollout(sampler, trace_callback=seen.append, success_callback=answers_yes)
    results = rollout(CHATS, seed=1)
    assert all(one is other for one, other in zip(seen, results, strict=True))


@pytest.mark.parametrize('name', ['trace_callback', 'success_callback'])
def test_a_callback_that_raises_is_named(sampler: ScriptedSampler, tmp_path: Path, name: str) -> None:
    """CallbackFailed names the callback and has the callback's error as its cause; an interrupt is not converted."""
    failures: list[BaseException] = [LookupError('no'), KeyboardInterrupt()]

    def fail(rollout: Rollout) -> None:
        if not answers_yes(rollout):
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


def test_invalid_trace_options_are_refused(sampler: ScriptedSampler, tmp_path: Path) -> None:
    """A file as the trace folder or a callback that is not callable raises ValueError before sampling."""
    (tmp_path / 'file').write_text('')
    refused: list[dict[str, Any]] = [
        {'trace_dir': tmp_path / 'file'}, {'trace_callback': 'print'}, {'success_callback': 1},
    ]  # fmt: skip
    for options in refused:
        with pytest.raises(ValueError, match=next(iter(options))):
            MultiTurnRollout(sampler, **options)
    assert not sampler.prompts


def test_a_fact_of_the_environment_is_not_overwritten(sampler: ScriptedSampler) -> None:
    """A success callback raises ValueError if the environment already reports a fact with its name."""

    class ReportsSuccess:
        """Environment that ends the chat after one turn and reports success."""

        def reset(self, trajectory: Any, *, seed: int | None) -> Any:
            """Return the trajectory unchanged."""
            return trajectory

        def step(self, message: Any, *, is_last: bool) -> EnvStep:
            """End the chat."""
            return EnvStep(is_done=True, facts={'success': 1.0})

        def close(self) -> None:
            """Release nothing."""

    with pytest.raises(ValueError, match='success'):
        MultiTurnRollout(sampler, env=ReportsSuccess, success_callback=answers_yes)(CHATS, seed=1)
