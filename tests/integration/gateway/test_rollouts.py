"""Tests of `RolloutService` over loopback, with the runs that a model service reports."""

import math
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from fixtures.gateway_upstream import Upstream, adapter_event, wait_until
from fixtures.running_gateway import ADMIN, RunningGateway, bearer, failure_of, running_gateway
from twinkle.api.data.v1 import message_pb2
from twinkle.api.gateway.v1 import catalogue_service_pb2, catalogue_service_pb2_grpc, rollout_service_pb2_grpc
from twinkle.api.gateway.v1 import rollout_service_pb2 as messages
from twinkle.api.gateway.v1.key_service_pb2 import SCOPE_SAMPLE
from twinkle.api.sampler.v1.sampling_pb2 import VersionSpan
from twinkle_services.kit.rpc.tensors import tensor_to_proto

TOKENS = tensor_to_proto(np.array([5, 6, 7], dtype=np.int32))
LOGPROBS = tensor_to_proto(np.array([-0.5, -math.inf, math.nan], dtype=np.float32))


def stub_of(gateway: RunningGateway) -> Any:
    return rollout_service_pb2_grpc.RolloutServiceStub(gateway.channel)


def chat(*turns: tuple[Any, str]) -> list[message_pb2.Message]:
    """Return messages with roles and texts."""
    return [message_pb2.Message(role=role, parts=[message_pb2.ContentPart(text=text)]) for role, text in turns]


def whole_rollout() -> messages.Rollout:
    """Return a rollout with a value in every field."""
    prompt = message_pb2.Trajectory(messages=chat((message_pb2.ROLE_USER, '2 + 2')))
    prompt.user_data['answer'].number_value = 4
    rollout = messages.Rollout(
        index=3,
        prompt_chat=prompt,
        prompt_text='<user>2 + 2',
        prompt_token_ids=TOKENS,
        completion_messages=chat((message_pb2.ROLE_ASSISTANT, '4')),
        completion_text='4',
        token_ids=TOKENS,
        logprobs=LOGPROBS,
        token_advantages=LOGPROBS,
        reward=0.5,
        reward_parts={'accuracy': 1.0, 'format': 0.0},
        advantage=-1.5,
        finish_reason='stop',
        version_spans=[VersionSpan(version=4, begin_token=0, end_token=1), VersionSpan(begin_token=2, end_token=3)],
    )
    assert {field.name for field, _ in rollout.ListFields()} == set(messages.Rollout.DESCRIPTOR.fields_by_name)
    return rollout


def log_request(*rewards: float | None, run_id: str = 'ad-1', step: int = 3, group_id: str = 'a') -> Any:
    """Return a request that logs a rollout for each reward."""
    rollouts = [messages.Rollout(index=index, reward=reward) for index, reward in enumerate(rewards)]
    group = messages.RolloutGroup(group_id=group_id, rollouts=rollouts)
    return messages.LogRolloutsRequest(run_id=run_id, step=step, groups=[group])


async def listed(gateway: RunningGateway, **filters: Any) -> messages.ListRolloutsResponse:
    request = messages.ListRolloutsRequest(**{'run_id': 'ad-1', **filters})
    return await stub_of(gateway).ListRollouts(request, metadata=ADMIN)


async def test_rollouts_are_returned_after_a_restart(tmp_path: Path) -> None:
    """A rollout is returned with every logged field, and lists summarize it, before and after a restart."""
    upstream, rollout = Upstream(), whole_rollout()
    upstream.adapters.watch.snapshot = [adapter_event('ad-1')]
    request = log_request(run_id='ad-1', step=2**53 - 1, group_id='x/y')
    request.groups[0].rollouts.extend([rollout, messages.Rollout(index=0)])
    async with upstream.serving():
        async with running_gateway(tmp_path, upstream=upstream.address) as gateway:
            for _ in range(2):
                response = await stub_of(gateway).LogRollouts(request, metadata=ADMIN)
                assert response.removed_group_count == 0
        async with running_gateway(tmp_path, upstream=upstream.address) as gateway:
            (group,) = (await listed(gateway)).groups
            assert (group.step, group.group_id, group.is_degenerate) == (2**53 - 1, 'x/y', False)
            assert group.update_time.ToDatetime() == gateway.clock.now().replace(tzinfo=None)
            empty, summary = group.rollouts
            assert summary == messages.RolloutSummary(
                rollout_id=f'{2**53 - 1}/x/y/3',
                index=3,
                reward=0.5,
                reward_parts={'accuracy': 1.0, 'format': 0.0},
                advantage=-1.5,
                finish_reason='stop',
                prompt_token_count=3,
                completion_token_count=3,
                oldest_version=0,
                newest_version=4,
                prompt_preview='2 + 2',
                completion_preview='4',
            )
            assert empty == messages.RolloutSummary(rollout_id=f'{2**53 - 1}/x/y/0')
            wanted = messages.GetRolloutRequest(run_id='ad-1', rollout_id=summary.rollout_id)
            found = await stub_of(gateway).GetRollout(wanted, metadata=ADMIN)
            assert found.rollout == rollout
            assert (found.step, found.group_id, found.update_time) == (group.step, group.group_id, group.update_time)


async def test_groups_have_statistics(gateway: RunningGateway, upstream: Upstream) -> None:
    """Statistics describe a group's finite rewards and parts, and groups with equal rewards are marked."""
    upstream.adapters.watch.changes.put_nowait(adapter_event('ad-1'))
    request = log_request(1.0, 3.0, None, math.nan)
    request.groups[0].rollouts[1].reward_parts.update(format=0.25, accuracy=math.inf)
    for logged in (
        request,
        log_request(0.5, 0.5, 0.5, step=2),
        log_request(1e308, 1e308 / 2, step=1),
        log_request(1.0, step=0),
        log_request(None, None, step=0, group_id='b'),
    ):
        await stub_of(gateway).LogRollouts(logged, metadata=ADMIN)
    mixed, equal, large, single, unknown = (await listed(gateway)).groups
    assert mixed.reward == messages.RewardStatistics(
        count=2, mean=2.0, standard_deviation=1.0, minimum=1.0, maximum=3.0
    )
    assert dict(mixed.reward_parts) == {
        'accuracy': messages.RewardStatistics(),
        'format': messages.RewardStatistics(count=1, mean=0.25, minimum=0.25, maximum=0.25),
    }
    assert [group.is_degenerate for group in (mixed, equal, large, single, unknown)] == [False, True, *[False] * 3]
    assert (equal.reward.mean, equal.reward.standard_deviation) == (0.5, 0.0)
    assert large.reward.mean == pytest.approx(0.75e308)
    assert unknown.reward == messages.RewardStatistics()


async def test_lists_are_paged_and_filtered(gateway: RunningGateway, upstream: Upstream) -> None:
    """Pages list the newest steps first; a token of another query is refused."""
    upstream.adapters.watch.changes.put_nowait(adapter_event('ad-1'))
    for step in range(4):
        for group_id in ('b', 'a'):
            await stub_of(gateway).LogRollouts(log_request(1.0, step=step, group_id=group_id), metadata=ADMIN)
    filters = {'begin_step': 1, 'end_step': 3, 'page_size': 3}
    first = await listed(gateway, **filters)
    assert [(group.step, group.group_id) for group in first.groups] == [(2, 'a'), (2, 'b'), (1, 'a')]
    second = await listed(gateway, **filters, page_token=first.next_page_token)
    assert [(group.step, group.group_id) for group in second.groups] == [(1, 'b')]
    assert not second.next_page_token
    assert [group.step for group in (await listed(gateway, group_id='b')).groups] == [3, 2, 1, 0]
    oldest = await listed(gateway, **{**filters, 'is_ascending': True})
    assert [(group.step, group.group_id) for group in oldest.groups] == [(1, 'a'), (1, 'b'), (2, 'a')]
    for changed in ({'begin_step': 0}, {'group_id': 'a'}, {'end_step': 4}, {'is_ascending': True}, {'page_token': 'x'}):
        failure = await failure_of(listed(gateway, **{**filters, 'page_token': first.next_page_token, **changed}))
        assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, 'INVALID_PAGE_TOKEN')


async def test_run_of_another_tenant_does_not_exist(gateway: RunningGateway, upstream: Upstream) -> None:
    """The rollouts of another tenant's run cannot be logged or read, although the run has rollouts."""
    upstream.adapters.watch.changes.put_nowait(adapter_event('ad-1'))
    await stub_of(gateway).LogRollouts(log_request(1.0), metadata=ADMIN)
    other, stub = bearer((await gateway.make_key('bob')).secret), stub_of(gateway)
    wanted = messages.GetRolloutRequest(run_id='ad-1', rollout_id='3/a/0')
    for call in (
        stub.LogRollouts(log_request(9.0), metadata=other),
        stub.ListRollouts(messages.ListRolloutsRequest(run_id='ad-1'), metadata=other),
        stub.GetRollout(wanted, metadata=other),
    ):
        failure = await failure_of(call)
        assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, 'RUN_NOT_FOUND')
    assert (await stub.GetRollout(wanted, metadata=ADMIN)).rollout.reward == 1.0


async def test_key_for_sampling_reads_and_does_not_log(gateway: RunningGateway, upstream: Upstream) -> None:
    """Logging needs the scope for training; every key of the tenant reads rollouts."""
    upstream.adapters.watch.changes.put_nowait(adapter_event('ad-1', tenant_id='alice'))
    key = bearer((await gateway.make_key('alice', scopes=(SCOPE_SAMPLE,))).secret)
    failure = await failure_of(stub_of(gateway).LogRollouts(log_request(1.0), metadata=key))
    assert failure.code is grpc.StatusCode.PERMISSION_DENIED
    catalogue: Any = catalogue_service_pb2_grpc.CatalogueServiceStub(gateway.channel)
    listing = catalogue_service_pb2.ListRunsRequest()
    await wait_until(lambda: catalogue.ListRuns(listing, metadata=key), lambda response: bool(response.runs))
    response = await stub_of(gateway).ListRollouts(messages.ListRolloutsRequest(run_id='ad-1'), metadata=key)
    assert not response.groups
    failure = await failure_of(
        stub_of(gateway).GetRollout(messages.GetRolloutRequest(run_id='ad-1', rollout_id='0/a/0'), metadata=key)
    )
    assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, 'ROLLOUT_NOT_FOUND')


def _tensor(*values: float, dtype: type[np.generic] = np.float32) -> Any:
    return tensor_to_proto(np.array(values, dtype=dtype))


@pytest.mark.parametrize(
    ('changes', 'field'),
    [
        ({'index': None}, 'index'),
        ({'index': -1}, 'index'),
        ({'index': 1024}, 'index'),
        ({'prompt_chat': message_pb2.Trajectory(messages=[message_pb2.Message()])}, 'prompt_chat.messages[0].role'),
        ({'completion_messages': [*chat((3, 'a')), *chat((9, 'a'))]}, 'completion_messages[1].role'),
        ({'prompt_token_ids': _tensor(1.0)}, 'prompt_token_ids.dtype'),
        ({'token_ids': _tensor(1, dtype=np.int64)}, 'token_ids.dtype'),
        ({'logprobs': tensor_to_proto(np.zeros((1, 3), dtype=np.float32))}, 'logprobs.shape'),
        ({'token_ids': TOKENS, 'logprobs': _tensor(1.0)}, 'logprobs'),
        ({'token_ids': TOKENS, 'token_advantages': _tensor(1.0)}, 'token_advantages'),
        ({'logprobs': LOGPROBS, 'token_advantages': _tensor()}, 'token_advantages'),
        ({'reward_parts': {str(index): 0.0 for index in range(17)}}, 'reward_parts'),
        ({'reward_parts': {'a b': 0.0}}, 'reward_parts'),
        ({'finish_reason': 'x' * 65}, 'finish_reason'),
        ({'finish_reason': 'a\n'}, 'finish_reason'),
        ({'version_spans': [VersionSpan(version=-1, end_token=1)]}, 'version_spans[0].version'),
        ({'version_spans': [VersionSpan(begin_token=-1, end_token=1)]}, 'version_spans[0].begin_token'),
        ({'version_spans': [VersionSpan(begin_token=1, end_token=1)]}, 'version_spans[0].end_token'),
        (
            {'version_spans': [VersionSpan(end_token=2), VersionSpan(begin_token=1, end_token=3)]},
            'version_spans[1].begin_token',
        ),
        ({'token_ids': TOKENS, 'version_spans': [VersionSpan(end_token=4)]}, 'version_spans[0].end_token'),
    ],
)
async def test_invalid_rollouts_are_refused(gateway: RunningGateway, changes: dict[str, Any], field: str) -> None:
    """The error for an invalid rollout names the field, before the run is looked up."""
    request = log_request(0.0)
    invalid = {'index': 1, **changes}
    request.groups[0].rollouts.append(messages.Rollout(**invalid))
    failure = await failure_of(stub_of(gateway).LogRollouts(request, metadata=ADMIN))
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert failure.metadata['field'] == f'groups[0].rollouts[1].{field}'


async def test_large_rollouts_are_refused(tmp_path: Path) -> None:
    """A rollout of 4 MiB is stored; the error for a larger rollout names the field."""
    upstream = Upstream()
    upstream.adapters.watch.snapshot = [adapter_event('ad-1')]
    limits = {'message_bytes': 16 << 20}
    async with upstream.serving(), running_gateway(tmp_path, upstream=upstream.address, limits=limits) as gateway:
        request = log_request(0.0)
        rollout = request.groups[0].rollouts[0]
        rollout.completion_text = 'x' * ((4 << 20) - 16)
        rollout.completion_text += 'x' * ((4 << 20) - rollout.ByteSize())
        await stub_of(gateway).LogRollouts(request, metadata=ADMIN)
        rollout.completion_text += 'x'
        failure = await failure_of(stub_of(gateway).LogRollouts(request, metadata=ADMIN))
        assert (failure.code, failure.metadata['field']) == (
            grpc.StatusCode.INVALID_ARGUMENT, 'groups[0].rollouts[0]',
        )  # fmt: skip
        (group,) = (await listed(gateway)).groups
        assert group.rollouts[0].completion_preview == 'x' * 160


def _group(group_id: str = 'a', count: int = 1) -> messages.RolloutGroup:
    return messages.RolloutGroup(group_id=group_id, rollouts=[messages.Rollout(index=index) for index in range(count)])


@pytest.mark.parametrize(
    ('changes', 'field'),
    [
        ({'run_id': ''}, 'run_id'),
        ({'step': None}, 'step'),
        ({'step': -1}, 'step'),
        ({'step': 2**53}, 'step'),
        ({'groups': []}, 'groups'),
        ({'groups': [_group('a', 1000), _group('b', 25)]}, 'groups'),
        ({'groups': [_group(), _group('')]}, 'groups[1].group_id'),
        ({'groups': [_group('ü')]}, 'groups[0].group_id'),
        ({'groups': [_group('x' * 129)]}, 'groups[0].group_id'),
        ({'groups': [_group(), _group()]}, 'groups[1].group_id'),
        ({'groups': [_group(count=0)]}, 'groups[0].rollouts'),
        ({'groups': [messages.RolloutGroup(group_id='a', rollouts=[*_group(count=2).rollouts, *_group().rollouts])]},
         'groups[0].rollouts[2].index'),
    ],
)  # fmt: skip
async def test_invalid_requests_are_refused(gateway: RunningGateway, changes: dict[str, Any], field: str) -> None:
    """The error for an invalid request names the field, before the run is looked up."""
    request = messages.LogRolloutsRequest(**{'run_id': 'ad-1', 'step': 0, 'groups': [_group()], **changes})
    failure = await failure_of(stub_of(gateway).LogRollouts(request, metadata=ADMIN))
    assert (failure.code, failure.metadata['field']) == (grpc.StatusCode.INVALID_ARGUMENT, field)


@pytest.mark.parametrize(
    ('filters', 'field'),
    [
        ({'run_id': ''}, 'run_id'),
        ({'begin_step': -1}, 'begin_step'),
        ({'end_step': -1}, 'end_step'),
        ({'group_id': 'a b'}, 'group_id'),
        ({'page_size': -1}, 'page_size'),
    ],
)
async def test_invalid_filters_are_refused(gateway: RunningGateway, filters: dict[str, Any], field: str) -> None:
    """The error for an invalid filter names the field."""
    failure = await failure_of(listed(gateway, **filters))
    assert (failure.code, failure.metadata['field']) == (grpc.StatusCode.INVALID_ARGUMENT, field)


@pytest.mark.parametrize(
    'rollout_id', ['3', '3/a', '3/a/', '/a/0', '03/a/0', '3/a/00', '-3/a/0', '3//0', '3/a/1', '٣/a/0']
)
async def test_unknown_rollouts_are_not_found(gateway: RunningGateway, upstream: Upstream, rollout_id: str) -> None:
    """An id without a stored rollout is not found, whether or not the id is malformed."""
    upstream.adapters.watch.changes.put_nowait(adapter_event('ad-1'))
    await stub_of(gateway).LogRollouts(log_request(1.0), metadata=ADMIN)
    wanted = messages.GetRolloutRequest(run_id='ad-1', rollout_id=rollout_id)
    failure = await failure_of(stub_of(gateway).GetRollout(wanted, metadata=ADMIN))
    assert (failure.code, failure.metadata['rolloutId']) == (grpc.StatusCode.NOT_FOUND, rollout_id)


async def test_rollouts_of_a_run_are_limited(tmp_path: Path) -> None:
    """A full run keeps the newest groups and refuses a request that does not fit, even after a restart."""
    upstream = Upstream()
    upstream.adapters.watch.snapshot = [adapter_event('ad-1'), adapter_event('ad-2')]
    text = np.random.default_rng(0).integers(0, 1 << 30, 1000, dtype=np.int32)
    request = log_request(1.0)
    request.groups[0].rollouts[0].token_ids.CopyFrom(tensor_to_proto(text))
    async with upstream.serving():
        for start in (0, 4):
            async with running_gateway(tmp_path, upstream=upstream.address, rollout_bytes_per_run=16_000) as gateway:
                for request.step in range(start, start + 4):
                    await stub_of(gateway).LogRollouts(request, metadata=ADMIN)
                response = await listed(gateway)
                assert [group.step for group in response.groups] == [start + 3, start + 2, start + 1]
                assert response.removed_group_count == 1 + start
                large = log_request(1.0, step=9)
                for _ in range(4):
                    large.groups.add(group_id=f'g{len(large.groups)}').rollouts.add(index=0).CopyFrom(
                        request.groups[0].rollouts[0]
                    )
                failure = await failure_of(stub_of(gateway).LogRollouts(large, metadata=ADMIN))
                assert (failure.code, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 'QUOTA_EXCEEDED')
                assert len((await listed(gateway)).groups) == 3
