"""Unit tests of rollouts: their facts, their delivery, and the backends that receive them."""

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from twinkle.data_format import SampledSequence, SampleResponse, StopReason, VersionSpan
from twinkle.tracking import RolloutBackend, TrackedRollout, TrackedRun, TrackerBackend, open_tracker, tracked_rollouts
from twinkle.tracking.backends.service import ServiceBackend
from twinkle.tracking.delivery import Delivery
from twinkle.tracking.rollouts import rollout_table

QUESTION = {'role': 'user', 'content': '2 + 2'}


class FakeBackend:
    """A backend that records numbers and rollouts once it is released."""

    name = 'fake'

    def __init__(self, *, is_failing: bool = False) -> None:
        self.is_failing = is_failing
        self.entered, self.released = threading.Event(), threading.Event()
        self.released.set()
        self.logged: list[tuple[int, Any]] = []

    def start(self, run: TrackedRun) -> None:
        """Accept every run."""

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Record the values."""
        self.logged.append((step, dict(values)))

    def log_rollouts(self, rollouts: Sequence[TrackedRollout], *, step: int) -> None:
        """Record the completions."""
        self.entered.set()
        self.released.wait()
        if self.is_failing:
            raise ConnectionError('no connection')
        self.logged.append((step, [rollout.completion_preview for rollout in rollouts]))

    def finish(self, status: str) -> None:
        """Accept every status."""


class NumbersOnly:
    """A backend without a method for rollouts."""

    name = 'numbers'

    def __init__(self) -> None:
        self.logged: list[int] = []

    def start(self, run: TrackedRun) -> None:
        """Accept every run."""

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Record the step."""
        del values
        self.logged.append(step)

    def finish(self, status: str) -> None:
        """Accept every status."""


class FakeStore:
    """Store of the metrics or the rollouts of a run in the services."""

    run_id = 'ad-7'

    def __init__(self) -> None:
        self.logged: list[tuple[int, Any]] = []

    def log(self, values: Any, *, step: int) -> None:
        """Store values or rollouts."""
        self.logged.append((step, values))


def responses(*texts: str) -> list[SampleResponse]:
    """Return a response to each of two prompts, with completions of these texts."""
    sequences = [
        SampledSequence(
            stop_reason=StopReason.STOP,
            tokens=[10, 11],
            logprobs=[[(10, -0.1)], [(11, -1.5)]],
            decoded=text,
            version_spans=[VersionSpan(version=3, begin_token=0, end_token=2)],
            new_input_feature={'messages': [QUESTION, {'role': 'assistant', 'content': text}]},
        )
        for text in texts
    ]
    return [SampleResponse(sequences=sequences, prompt_token_ids=[1, 2]) for _ in range(2)]


def test_facts_of_sampled_completions_are_json_values():
    """Prompt, completion, rewards, log-probabilities and versions are JSON values with few digits."""
    rollouts = tracked_rollouts(
        responses('4', '5'),
        rewards=torch.tensor([1.0, 0.0, 0.5, 0.5]),
        advantages=np.array([0.5, -0.5, 0.0, 0.0]),
        reward_parts={'format': [1, 1, 0, True]},
    )
    assert [(rollout.group_id, rollout.index) for rollout in rollouts] == [
        ('0000', 0), ('0000', 1), ('0001', 0), ('0001', 1),
    ]  # fmt: skip
    assert json.loads(json.dumps(rollouts[1].to_json())) == {
        'group_id': '0000',
        'index': 1,
        'reward': 0.0,
        'reward_parts': {'format': 1.0},
        'advantage': -0.5,
        'finish_reason': 'stop',
        'prompt_messages': [QUESTION],
        'completion_text': '5',
        'prompt_token_ids': [1, 2],
        'token_ids': [10, 11],
        'logprobs': [-0.1, -1.5],
        'version_spans': [[3, 0, 2]],
    }
    assert tracked_rollouts(rollouts) == rollouts


def test_tokens_that_were_not_sampled_have_no_log_probability():
    """A feature of several turns has null log-probabilities for tokens of a tool, and an advantage for every token."""
    feature = {
        'input_ids': np.array([1, 2, 10, 20, 11]),
        'completion_mask': [0, 0, 1, 0, 1],
        'old_logps': [0.0, -0.25, 0.0, -0.5, 0.0],
        'prompt': 'a text',
        'user_data': [('answer', '4')],
    }
    (rollout,) = tracked_rollouts([feature], advantages=[[1.0, 0.0, 2.0]])
    facts = rollout.to_json()
    assert facts == {
        'group_id': '0000', 'index': 0, 'prompt_text': 'a text', 'prompt_token_ids': [1, 2],
        'token_ids': [10, 20, 11], 'logprobs': [-0.25, None, -0.5], 'token_advantages': [1.0, 0.0, 2.0],
    }  # fmt: skip


@pytest.mark.parametrize(
    ('trajectories', 'facts', 'problem'),
    [
        ([3], {}, r'trajectories\[0\]: expected a result of a sampler.*got int'),
        (responses('4'), {'rewards': [1.0]}, 'rewards must have a value for each of 2 completions, got 1'),
        (responses('4'), {'rewards': '11'}, 'rewards: expected a list of numbers'),
        (responses('4'), {'rewards': [None, 1.0]}, 'rewards: expected numbers, got NoneType'),
        (
            responses('4'),
            {'advantages': [[1.0], [1.0, 2.0]]},
            r'advantages\[0\] must have a value for each of 2 tokens',
        ),
        (responses('4'), {'reward_parts': {'a': [1]}}, r"reward_parts\['a'\] must have a value for each of 2"),
        (responses('4'), {'groups': 3}, 'groups: 2 completions cannot be divided into groups of 3'),
        ([TrackedRollout()], {'rewards': [1.0]}, 'these rollouts have their rewards and groups already'),
        (responses('4'), {'step': -1}, 'step: must be from 0'),
    ],
)
def test_invalid_rollouts_are_refused_before_any_backend_receives_them(trajectories: Any, facts: Any, problem: str):
    """The error for an invalid completion, reward or group names it, and nothing of the call is stored."""
    backend = FakeBackend()
    with open_tracker([backend]) as tracker, pytest.raises((TypeError, ValueError), match=problem):
        tracker.log_rollouts(trajectories, **{'step': 0, **facts})
    assert backend.logged == []


def test_only_backends_with_the_method_receive_rollouts():
    """Numbers and rollouts keep their order; a backend without the method for rollouts receives only numbers."""
    both, numbers = FakeBackend(), NumbersOnly()
    assert isinstance(both, RolloutBackend)
    assert not isinstance(numbers, RolloutBackend)
    with open_tracker([both, numbers]) as tracker:
        tracker.log({'loss': 1.0}, step=0)
        tracker.log_rollouts(responses('4'), step=1)
        tracker.log({'loss': 2.0}, step=2)
    assert both.logged == [(0, {'loss': 1.0}), (1, ['4', '4']), (2, {'loss': 2.0})]
    assert numbers.logged == [0, 2]
    assert tracker.lost_counts == {'fake': 0, 'numbers': 0}
    with pytest.raises(RuntimeError, match='has ended'):
        tracker.log_rollouts(responses('4'), step=3)


def test_lost_rollouts_are_counted_with_a_warning(caplog: pytest.LogCaptureFixture):
    """A backend that fails loses one call with the rollouts of a step, and receives later numbers."""
    backend = FakeBackend(is_failing=True)
    with caplog.at_level(logging.WARNING), open_tracker([backend]) as tracker:
        tracker.log_rollouts(responses('4'), step=7)
        tracker.log({'loss': 1.0}, step=7)
    assert (backend.logged, tracker.lost_counts) == ([(7, {'loss': 1.0})], {'fake': 1})
    assert caplog.records[0].getMessage() == (
        'tracker fake lost the rollouts of step 7, training continues: ConnectionError: no connection'
    )


def test_few_calls_with_rollouts_wait_and_numbers_are_not_affected():
    """A slow backend has a smaller queue for rollouts, because rollouts are large; numbers wait behind them."""
    backend = FakeBackend()
    backend.released.clear()
    delivery = Delivery(backend, rollout_capacity=2)
    delivery.log_rollouts([], step=0)
    backend.entered.wait()
    for step in range(1, 5):
        delivery.log_rollouts([], step=step)
        delivery.log({'loss': 0.0}, step=step)
    assert delivery.lost_count == 2
    backend.released.set()
    delivery.close('finished')
    delivery.join(60.0)
    assert [step for step, values in backend.logged if values == []] == [0, 1, 2]
    assert [step for step, values in backend.logged if values] == [1, 2, 3, 4]


def test_the_store_of_the_services_receives_rollouts():
    """Rollouts reach the run's rollout store in the form that `RunRollouts.log` accepts."""
    metrics, store = FakeStore(), FakeStore()
    with open_tracker(metrics=metrics, rollouts=store) as tracker:
        tracker.log_rollouts(responses('4'), step=3, rewards=[1.0, 0.0])
    ((step, rollouts),) = store.logged
    assert (step, [rollout.reward for rollout in rollouts]) == (3, [1.0, 0.0])
    assert metrics.logged == []
    without: TrackerBackend = ServiceBackend(metrics)
    with open_tracker([without]) as tracker:
        tracker.log_rollouts(responses('4'), step=3)
    assert tracker.lost_counts == {'service': 0}
    with pytest.raises(ValueError, match="rollouts: needs the tracker 'service'"):
        open_tracker(['jsonl'], rollouts=store)


def test_json_files_contain_a_line_for_each_rollout(tmp_path):
    """The rollouts of all steps, even of a continued run, are in one file next to the file of the metrics."""
    for step in (0, 1):
        with open_tracker('jsonl', folder=tmp_path, run_id='r') as tracker:
            tracker.log_rollouts(responses('4'), step=step, rewards=[1.0, 0.0])
        with (tmp_path / 'twinkle' / 'r.rollouts.jsonl').open('a') as file:
            file.write('{"step": 1, "gro')
    with open_tracker('jsonl', folder=tmp_path, run_id='r'):
        pass
    lines = [json.loads(line) for line in (tmp_path / 'twinkle' / 'r.rollouts.jsonl').read_text().splitlines()]
    assert [(line['step'], line['group_id'], line['reward']) for line in lines] == [
        (0, '0000', 1.0), (0, '0001', 0.0), (1, '0000', 1.0), (1, '0001', 0.0),
    ]  # fmt: skip
    assert sorted(path.name for path in (tmp_path / 'twinkle').iterdir()) == ['r.json', 'r.jsonl', 'r.rollouts.jsonl']


def test_tables_have_a_column_for_each_part_of_the_reward():
    """Tables of trackers contain texts and numbers; unknown values are empty."""
    columns, rows = rollout_table(tracked_rollouts(responses('4'), reward_parts={'format': [1, 0]}), step=2)
    assert dict(zip(columns, rows[1], strict=True)) == {
        'step': 2, 'group': '0001', 'index': 0, 'prompt': '2 + 2', 'completion': '4', 'reward': None,
        'reward/format': 0.0, 'advantage': None, 'tokens': 2, 'finish_reason': 'stop', 'oldest_version': 3,
    }  # fmt: skip
