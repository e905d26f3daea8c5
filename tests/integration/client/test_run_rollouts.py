"""Tests of `RunRollouts` and `twinkle run rollouts` with a gateway."""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fixtures.gateway_run import client_with_run, command_line, gateway_with_run
from fixtures.running_gateway import ADMIN_KEY, RunningGateway
from twinkle.data_format import SampledSequence, SampleResponse, SampleResults, StopReason, VersionSpan, pack_user_data
from twinkle.rollout import EndReason, Rollout
from twinkle_client import NotFoundError, QuotaError, TwinkleClient, UsageError
from twinkle_client.rollouts import RunRollouts
from twinkle_client.sampler.results import completion_feature

CHAT: dict[str, Any] = {
    'messages': [{'role': 'system', 'content': ' '}, {'role': 'user', 'content': '2 + 2'}],
    'user_data': pack_user_data({'answer': 4}),
}


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[RunningGateway]:
    """A gateway with the run 'ad-1'."""
    limits = {'message_bytes': 64 << 20}
    async with gateway_with_run(tmp_path, limits=limits, rollout_bytes_per_run=1 << 20) as running:
        yield running


@pytest.fixture
async def rollouts(gateway: RunningGateway) -> AsyncIterator[RunRollouts]:
    """Rollouts of the run 'ad-1'."""
    async with client_with_run(gateway) as client:
        yield RunRollouts('ad-1', client=client)


@pytest.fixture
def run(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that runs a command."""
    return command_line(monkeypatch, gateway.address)


def sampled(text: str, *, tokens: int = 3, chat: Any = CHAT) -> SampledSequence:
    """Return a completion of a prompt of two tokens, in the form in which the sampler returns it."""
    sequence = SampledSequence(
        stop_reason=StopReason.STOP,
        tokens=list(range(10, 10 + tokens)),
        logprobs=[[(token, -0.5), (7, -1.0)] for token in range(10, 10 + tokens)],
        decoded=text,
        version_spans=[VersionSpan(version=4, begin_token=0, end_token=tokens)],
    )
    feature = completion_feature(chat, np.array([1, 2], dtype=np.int32), sequence)
    return replace(sequence, new_input_feature=feature)


def responses(*groups: list[str]) -> SampleResults:
    """Return the responses to prompts of two tokens, with completions of these texts."""
    return SampleResults(
        SampleResponse(sequences=[sampled(text) for text in texts], prompt_token_ids=[1, 2]) for texts in groups
    )


def listed_values(values: Any) -> Any:
    return None if values is None else values.tolist()


async def test_results_of_a_sampler_are_logged(rollouts: RunRollouts) -> None:
    """The completions of each prompt form a group, with rewards, advantages and the whole content of each rollout."""
    await rollouts.log.aio(
        responses(['4', '5'], ['4', '4']),
        step=np.int64(7),
        rewards=torch.tensor([1.0, 0.0, 1.0, 1.0]),
        advantages=np.array([0.5, -0.5, 0.0, 0.0]),
        reward_parts={'format': [1, 1, 1, True]},
    )
    first, second = await rollouts.list.aio()
    assert [(group.step, group.group_id, group.is_degenerate) for group in (first, second)] == [
        (7, '0000', False), (7, '0001', True),
    ]  # fmt: skip
    assert (first.reward.mean, first.reward.minimum, first.reward_parts['format'].count) == (0.5, 0.0, 2)
    assert [item.rollout_id for item in first.rollouts] == ['7/0000/0', '7/0000/1']
    assert (first.rollouts[1].prompt_preview, first.rollouts[1].completion_preview) == ('2 + 2', '5')
    found = await rollouts.get.aio('7/0000/1')
    assert (found.step, found.group_id, found.index) == (7, '0000', 1)
    assert (found.reward, found.advantage, found.reward_parts) == (0.0, -0.5, {'format': 1.0})
    assert found.prompt_chat == CHAT
    assert (found.completion_text, found.completion_messages, found.finish_reason) == ('5', [], 'stop')
    assert listed_values(found.prompt_token_ids) == [1, 2]
    assert listed_values(found.token_ids) == [10, 11, 12]
    assert listed_values(found.logprobs) == [-0.5] * 3
    assert found.version_spans == [VersionSpan(version=4, begin_token=0, end_token=3)]


@pytest.mark.parametrize('groups', [2, ['0000', '0000', '0001', '0001']])
async def test_sequences_are_logged_like_responses(rollouts: RunRollouts, groups: Any) -> None:
    """The sequences of all prompts in one list, with the size or the ids of the groups, give the same rollouts."""
    results = responses(['a', 'b'], ['c', 'd'])
    await rollouts.log.aio(results, step=0)
    await rollouts.log.aio(results.sequences, step=1, groups=groups)
    await rollouts.log.aio([results[0].sequences, results[1]], step=2)
    for index in range(2):
        for group in ('0000', '0001'):
            expected = await rollouts.get.aio(f'0/{group}/{index}')
            for step in (1, 2):
                found = await rollouts.get.aio(f'{step}/{group}/{index}')
                assert str(replace(found, rollout_id='', step=0)) == str(replace(expected, rollout_id=''))
    single = SampleResponse(sequences=[SampledSequence(stop_reason=StopReason.LENGTH, tokens=[5])])
    await rollouts.log.aio(single, step=3)
    found = await rollouts.get.aio('3/0000/0')
    assert (found.prompt_chat, found.prompt_token_ids, found.logprobs) == (None, None, None)
    assert (found.reward, found.advantage, found.version_spans, found.finish_reason) == (None, None, [], 'length')


async def test_chats_with_tools_are_logged(rollouts: RunRollouts) -> None:
    """A rollout of several turns has its own reward, and no log-probability for tokens that were not sampled."""
    turns: Any = [
        {'role': 'assistant', 'content': 'call'},
        {'role': 'tool', 'content': [{'type': 'text', 'text': 'four'}, {'type': 'image', 'image': object()}]},
        {'role': 'assistant', 'content': '4'},
    ]
    few_shot: Any = [{'role': 'user', 'content': '1 + 1'}, {'role': 'assistant', 'content': '2'}, *CHAT['messages'][1:]]
    feature: Any = {
        'input_ids': [1, 2, 10, 11, 20, 12],
        'completion_mask': [0, 0, 1, 1, 0, 1],
        'old_logps': [0.0, -0.25, -0.5, 0.0, -0.75, 0.0],
    }
    chat = Rollout(
        feature=feature,
        messages=[*few_shot, *turns],
        end_reason=EndReason.DONE,
        turn_count=2,
        rewards=[0.5, 1.0],
        version_spans=[
            VersionSpan(version=3, begin_token=2, end_token=4), VersionSpan(version=4, begin_token=5, end_token=6),
        ],
        facts={},
        trajectory_index=5,
        sample_index=0,
    )  # fmt: skip
    await rollouts.log.aio([chat, chat], step=0, advantages=[[0.0, 1.0, 2.0, 3.0], torch.zeros(4)])
    (group,) = await rollouts.list.aio()
    assert (group.group_id, group.reward.mean) == ('0005', 1.5)
    assert (group.rollouts[0].oldest_version, group.rollouts[0].newest_version) == (3, 4)
    found = await rollouts.get.aio('0/0005/0')
    assert found.prompt_chat == {'messages': few_shot}
    turns[1]['content'] = 'four[image]'
    assert found.completion_messages == turns
    assert listed_values(found.token_ids) == [10, 11, 20, 12]
    assert str(listed_values(found.logprobs)) == '[-0.25, -0.5, nan, -0.75]'
    assert listed_values(found.token_advantages) == [0.0, 1.0, 2.0, 3.0]
    assert [(span.begin_token, span.end_token) for span in found.version_spans] == [(0, 2), (3, 4)]
    assert found.finish_reason == 'done'


async def test_features_and_chats_are_logged(rollouts: RunRollouts) -> None:
    """Features with labels, chats without tokens, and prompts as text are logged with all known fields."""
    feature = {'input_ids': [1, 2, 3], 'labels': [-100, 3, -100]}
    answered = {'messages': [*CHAT['messages'], {'role': 'assistant', 'content': '4'}]}
    await rollouts.log.aio([feature, answered, {'prompt': 'Say something.'}], step=0, rewards=[0, 1, math.nan])
    with_labels, chat, text = [await rollouts.get.aio(f'0/000{group}/0') for group in range(3)]
    assert (listed_values(with_labels.prompt_token_ids), listed_values(with_labels.token_ids)) == ([1, 2], [3])
    assert chat.prompt_chat == {'messages': CHAT['messages']}
    assert chat.completion_messages == answered['messages'][-1:]
    assert (text.prompt_text, text.token_ids, str(text.reward)) == ('Say something.', None, 'nan')


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ({'rewards': [1.0]}, 'rewards must have a value for each of 2 completions, got 1'),
        ({'rewards': '12'}, 'rewards: expected a list'),
        ({'rewards': ['a', 'b']}, 'rewards: expected numbers'),
        ({'advantages': [1.0, 2.0, 3.0]}, 'advantages must have a value for each of 2 completions, got 3'),
        ({'advantages': [0.0, [1.0]]}, r'advantages\[1\] must have a value for each of 3 tokens, got 1'),
        ({'reward_parts': {'format': [1.0]}}, r"reward_parts\['format'\] must have a value"),
        ({'groups': 3}, 'groups: 2 completions cannot be divided into groups of 3'),
        ({'groups': ['a']}, 'groups: expected a number, or a list'),
        ({'trajectories': [1, 2]}, r'trajectories\[0\]: expected a result of a sampler'),
    ],
)
async def test_arguments_that_do_not_match_are_refused(
    rollouts: RunRollouts, arguments: dict[str, Any], message: str
) -> None:
    """The error for an argument that does not match the completions names it, and nothing of the call is stored."""
    with pytest.raises((ValueError, TypeError), match=message):
        await rollouts.log.aio(**{'trajectories': responses(['4', '5']), 'step': 0, **arguments})
    assert await rollouts.list.aio() == []


async def test_errors_name_the_field_and_the_run(gateway: RunningGateway, rollouts: RunRollouts) -> None:
    """Invalid steps and names raise UsageError; unknown runs and rollouts raise NotFoundError."""
    for step in (-1, 2**53, 10**30):
        with pytest.raises(UsageError, match='step'):
            await rollouts.log.aio(responses(['4']), step=step)
    with pytest.raises(TypeError):
        await rollouts.log.aio(responses(['4']), step=1.5)
    with pytest.raises(UsageError, match=r'groups\[0\]\.group_id'):
        await rollouts.log.aio(responses(['4']), step=0, groups=['my group'])
    with pytest.raises(NotFoundError, match='0/a/0'):
        await rollouts.get.aio('0/a/0')
    client = TwinkleClient(gateway.address, ADMIN_KEY)
    with pytest.raises(NotFoundError, match='ad-9'):
        await RunRollouts('ad-9', client=client).list.aio()
    await asyncio.to_thread(client.close)


async def test_many_rollouts_are_sent_in_several_requests(rollouts: RunRollouts) -> None:
    """More rollouts or bytes than fit into one request are stored, and lists return them in several pages."""
    single = SampledSequence(stop_reason=StopReason.STOP, tokens=[1], decoded='a')
    await rollouts.log.aio([single] * 2100, step=0, groups=3)
    groups = await rollouts.list.aio(limit=1000)
    assert [group.group_id for group in groups] == [f'{index:04}' for index in range(700)]
    assert {len(group.rollouts) for group in groups} == {3}
    assert len(await rollouts.list.aio(limit=450)) == 450
    large = replace(single, decoded='a' * (3 << 20))
    await rollouts.log.aio([large] * 7, step=1, groups=7)
    (group,) = await rollouts.list.aio(begin_step=1, end_step=2, group_id='0000')
    assert [item.step for item in await rollouts.list.aio(limit=701, is_ascending=True)] == [0] * 700 + [1]
    assert [item.index for item in group.rollouts] == list(range(7))
    noise = np.random.default_rng(0).integers(0, 1 << 30, 1 << 18).tolist()
    with pytest.raises(QuotaError, match='rollout_bytes_per_run'):
        await rollouts.log.aio([replace(single, tokens=noise)] * 2, step=2, groups=2)


async def test_command_lists_groups_and_shows_rollouts(run: Any, rollouts: RunRollouts) -> None:
    """`twinkle run rollouts` prints groups and marks equal rewards, or prints a step's rollouts or one rollout."""
    empty = await run('run', 'rollouts', 'ad-1')
    assert (empty.exit_code, 'no rollouts' in empty.stderr) == (0, True)
    await rollouts.log.aio(responses(['[b]4\x1b[31m', '5'], ['6', '7']), step=1, rewards=[1.0, 0.0, 0.25, 0.25])
    await rollouts.log.aio(responses(['8']), step=0, rewards=[math.inf])
    shown = await run('run', 'rollouts', 'ad-1')
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.splitlines()
    assert [line.count('equal') for line in lines if '│' in line] == [0, 1, 0]
    assert sum('2 + 2' in line for line in lines) == 3
    step = await run('run', 'rollouts', 'ad-1', '--step', '1')
    assert '1/0001/1' in step.stdout
    assert '0/0000/0' not in step.stdout
    assert r'[b]4\x1b[31m' in step.stdout
    text = await run('run', 'rollouts', 'ad-1', '--rollout', '1/0000/0')
    assert '1/0000/0: reward 1, 3 tokens, mean log-probability -0.5, ended by stop' in text.stdout
    assert '[user] 2 + 2' in text.stdout
    assert '\n[b]4\\x1b[31m\n' in text.stdout
    printed = await run('run', 'rollouts', 'ad-1', '--json', '--limit', '3')
    groups = json.loads(printed.stdout[printed.stdout.index('{') : printed.stdout.rindex('}') + 1])['groups']
    assert [(group['step'], group['group_id'], group['is_degenerate']) for group in groups] == [
        (1, '0000', False), (1, '0001', True), (0, '0000', False),
    ]  # fmt: skip
    assert groups[2]['rollouts'][0]['reward'] == 'inf'
    one = await run('run', 'rollouts', 'ad-1', '--json', '--rollout', '1/0001/0')
    found = json.loads(one.stdout[one.stdout.index('{') : one.stdout.rindex('}') + 1])
    assert (found['token_ids'], found['logprobs'], found['reward']) == ([10, 11, 12], [-0.5] * 3, 0.25)
    missing = await run('run', 'rollouts', 'ad-1', '--rollout', '1/0001/9')
    assert missing.exit_code == 1
    assert "no rollout '1/0001/9'" in missing.stderr
