"""Serves `RolloutService`, converts its messages, and checks the fields of requests."""

# ruff: noqa: N802 (the methods have the contract's names)

import asyncio
import json
from collections.abc import Iterable, Sequence

from google.protobuf.message import Message

from twinkle.api.data.v1 import message_pb2
from twinkle.api.gateway.v1 import rollout_service_pb2 as messages
from twinkle.api.gateway.v1 import rollout_service_pb2_grpc
from twinkle.api.sampler.v1 import sampling_pb2
from twinkle_services.gateway.metrics.convert import metric_name_from_proto, run_step_from_proto
from twinkle_services.gateway.metrics.rules import MAX_STEP, is_metric_name
from twinkle_services.gateway.rollouts.rollouts import Rollouts
from twinkle_services.gateway.rollouts.rules import (
    MAX_LISTED_GROUPS,
    MAX_LOGGED,
    MAX_PARTS,
    MAX_REASON_LENGTH,
    MAX_ROLLOUT_BYTES,
    PREVIEW_LENGTH,
    GroupKey,
    Groups,
    GroupSummary,
    RewardStatistics,
    Rollout,
    RolloutFilter,
    RolloutPage,
    RolloutSummary,
    StoredRollout,
    rollout_id_of,
    statistics_of,
    statistics_of_parts,
)
from twinkle_services.kit.errors import InvalidField, InvalidPageToken
from twinkle_services.kit.paging import page_token_after, parse_page
from twinkle_services.kit.rpc.call import Context
from twinkle_services.kit.rpc.context import current_caller
from twinkle_services.kit.rpc.fields import id_from_proto, not_negative, text_from_proto, timestamp_to_proto
from twinkle_services.kit.rpc.message_bounds import convert_large
from twinkle_services.kit.rpc.tensors import tensor_data_from_proto


class RolloutServicer(rollout_service_pb2_grpc.RolloutServiceServicer):
    """Implements `RolloutService`."""

    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts = rollouts

    async def LogRollouts(self, request: messages.LogRolloutsRequest, context: Context) -> messages.LogRolloutsResponse:
        run_id, step = id_from_proto(request.run_id, 'run_id'), step_from_proto(request)
        groups = await convert_large(groups_from_proto, request)
        removed = await self._rollouts.log(current_caller(), run_id, step, groups)
        return messages.LogRolloutsResponse(removed_group_count=removed)

    async def ListRollouts(
        self, request: messages.ListRolloutsRequest, context: Context
    ) -> messages.ListRolloutsResponse:
        run_id, wanted = id_from_proto(request.run_id, 'run_id'), filter_from_proto(request)
        query = _query_of(request, current_caller().tenant_id)
        size, after = _page_from_proto(request, query)
        page = await self._rollouts.list(current_caller(), run_id, wanted, size=size, after=after)
        return await asyncio.to_thread(_list_response, page, query)

    async def GetRollout(self, request: messages.GetRolloutRequest, context: Context) -> messages.GetRolloutResponse:
        run_id, rollout_id = id_from_proto(request.run_id, 'run_id'), id_from_proto(request.rollout_id, 'rollout_id')
        found = await self._rollouts.get(current_caller(), run_id, rollout_id)
        return await asyncio.to_thread(_get_response, found)


def _query_of(request: messages.ListRolloutsRequest, tenant_id: str) -> str:
    """Return the query that a page token belongs to: the method, the tenant and all filters."""
    end_step = request.end_step if request.HasField('end_step') else None
    filters = [request.run_id, request.begin_step, end_step, request.group_id, request.is_ascending]
    return json.dumps(['rollouts', tenant_id, *filters])


def _page_from_proto(request: messages.ListRolloutsRequest, query: str) -> tuple[int, GroupKey | None]:
    """Return the size of a page and the last group of the previous one.

    Raises:
        InvalidField: the size is negative.
        InvalidPageToken: the token was not created for this query.
    """
    page = parse_page(request.page_size, request.page_token, query=query, key_types=(int, str))
    size = min(page.size, MAX_LISTED_GROUPS)
    if page.after is None:
        return size, None
    step, group_id = int(page.after[0]), str(page.after[1])
    if not 0 <= step <= MAX_STEP or not is_metric_name(group_id):
        raise InvalidPageToken()
    return size, (step, group_id)


def _list_response(page: RolloutPage, query: str) -> messages.ListRolloutsResponse:
    return messages.ListRolloutsResponse(
        groups=map(group_to_proto, page.groups),
        next_page_token=page_token_after(page.next_key, query=query),
        removed_group_count=page.removed_group_count,
    )


def _get_response(found: StoredRollout) -> messages.GetRolloutResponse:
    return messages.GetRolloutResponse(
        step=found.step,
        group_id=found.group_id,
        rollout=messages.Rollout.FromString(found.content),
        update_time=timestamp_to_proto(found.update_time),
    )


def step_from_proto(request: messages.LogRolloutsRequest) -> int:
    """Return the step of a request.

    Raises:
        InvalidField: the step is not set, or is out of range.
    """
    if not request.HasField('step'):
        raise InvalidField('step', 'must be set')
    return run_step_from_proto(request.step, 'step')


def groups_from_proto(request: messages.LogRolloutsRequest) -> Groups:
    """Return the rollouts of a request by group.

    Raises:
        InvalidField: there are no rollouts or too many, a group or an index occurs twice, or a field is invalid.
    """
    count = sum(len(group.rollouts) for group in request.groups)
    if not request.groups or count > MAX_LOGGED:
        raise InvalidField('groups', f'must have 1 to {MAX_LOGGED} rollouts, got {count}')
    groups: dict[str, list[Rollout]] = {}
    for position, group in enumerate(request.groups):
        field = f'groups[{position}]'
        group_id = metric_name_from_proto(group.group_id, f'{field}.group_id')
        if group_id in groups:
            raise InvalidField(f'{field}.group_id', f'must differ from other groups of the request, got {group_id!r}')
        if not group.rollouts:
            raise InvalidField(f'{field}.rollouts', 'must have at least one rollout')
        rollouts = [_rollout(item, f'{field}.rollouts[{index}]') for index, item in enumerate(group.rollouts)]
        _check_indices(rollouts, f'{field}.rollouts')
        groups[group_id] = rollouts
    return groups


def filter_from_proto(request: messages.ListRolloutsRequest) -> RolloutFilter:
    """Return the filter for groups.

    Raises:
        InvalidField: a step is negative, or the group's id is invalid.
    """
    return RolloutFilter(
        begin_step=not_negative(request.begin_step, 'begin_step'),
        end_step=not_negative(request.end_step, 'end_step') if request.HasField('end_step') else None,
        group_id=metric_name_from_proto(request.group_id, 'group_id') if request.group_id else '',
        is_ascending=request.is_ascending,
    )


def group_to_proto(group: GroupSummary) -> messages.RolloutGroupSummary:
    """Convert the facts of a group, and add the statistics of its rewards."""
    parts = statistics_of_parts(group.rollouts)
    return messages.RolloutGroupSummary(
        step=group.step,
        group_id=group.group_id,
        rollouts=[_summary_to_proto(rollout, group) for rollout in group.rollouts],
        reward=_statistics_to_proto(statistics_of([rollout.reward for rollout in group.rollouts])),
        reward_parts={name: _statistics_to_proto(statistics) for name, statistics in parts.items()},
        is_degenerate=group.is_degenerate,
        update_time=timestamp_to_proto(group.update_time),
    )


def _summary_to_proto(summary: RolloutSummary, group: GroupSummary) -> messages.RolloutSummary:
    return messages.RolloutSummary(
        rollout_id=rollout_id_of(group.step, group.group_id, summary.index),
        index=summary.index,
        reward=summary.reward,
        reward_parts=summary.reward_parts,
        advantage=summary.advantage,
        finish_reason=summary.finish_reason,
        prompt_token_count=summary.prompt_token_count,
        completion_token_count=summary.completion_token_count,
        oldest_version=summary.oldest_version,
        newest_version=summary.newest_version,
        prompt_preview=summary.prompt_preview,
        completion_preview=summary.completion_preview,
    )


def _statistics_to_proto(statistics: RewardStatistics) -> messages.RewardStatistics:
    return messages.RewardStatistics(
        count=statistics.count,
        mean=statistics.mean,
        standard_deviation=statistics.standard_deviation,
        minimum=statistics.minimum,
        maximum=statistics.maximum,
    )


def _rollout(rollout: messages.Rollout, field: str) -> Rollout:
    content = rollout.SerializeToString(deterministic=True)
    if len(content) > MAX_ROLLOUT_BYTES:
        raise InvalidField(field, f'must have at most {MAX_ROLLOUT_BYTES} bytes, got {len(content)}')
    _check_roles(rollout.prompt_chat.messages, f'{field}.prompt_chat.messages')
    _check_roles(rollout.completion_messages, f'{field}.completion_messages')
    prompt_count, token_count = _token_counts(rollout, field)
    _check_spans(rollout.version_spans, token_count, f'{field}.version_spans')
    versions = [span.version for span in rollout.version_spans]
    summary = RolloutSummary(
        index=_index(rollout, f'{field}.index'),
        content_bytes=len(content),
        reward=rollout.reward if rollout.HasField('reward') else None,
        reward_parts=_parts(rollout, f'{field}.reward_parts'),
        advantage=rollout.advantage if rollout.HasField('advantage') else None,
        finish_reason=text_from_proto(rollout.finish_reason, f'{field}.finish_reason', limit=MAX_REASON_LENGTH),
        prompt_token_count=prompt_count,
        completion_token_count=token_count,
        oldest_version=min(versions, default=None),
        newest_version=max(versions, default=None),
        prompt_preview=_text_of(rollout.prompt_chat.messages[-1:]) or rollout.prompt_text[-PREVIEW_LENGTH:],
        completion_preview=rollout.completion_text[:PREVIEW_LENGTH] or _text_of(rollout.completion_messages),
    )
    return Rollout(summary, content)


def _index(rollout: messages.Rollout, field: str) -> int:
    if not rollout.HasField('index'):
        raise InvalidField(field, 'must be set')
    if not 0 <= rollout.index < MAX_LOGGED:
        raise InvalidField(field, f'must be 0 to {MAX_LOGGED - 1}, got {rollout.index}')
    return rollout.index


def _check_indices(rollouts: Sequence[Rollout], field: str) -> None:
    indices = set[int]()
    for position, rollout in enumerate(rollouts):
        index = rollout.summary.index
        if index in indices:
            raise InvalidField(f'{field}[{position}].index', f'must differ from other rollouts, got {index}')
        indices.add(index)


def _parts(rollout: messages.Rollout, field: str) -> dict[str, float]:
    if len(rollout.reward_parts) > MAX_PARTS:
        raise InvalidField(field, f'must have at most {MAX_PARTS} items, got {len(rollout.reward_parts)}')
    return {metric_name_from_proto(name, field): rollout.reward_parts[name] for name in sorted(rollout.reward_parts)}


def _token_counts(rollout: messages.Rollout, field: str) -> tuple[int | None, int | None]:
    """Return the numbers of tokens of the prompt and of the completion; None if a number is not known."""
    prompt_count = _length(rollout, 'prompt_token_ids', field, dtype='int32')
    lengths = {'token_ids': _length(rollout, 'token_ids', field, dtype='int32')}
    for name in ('logprobs', 'token_advantages'):
        lengths[name] = _length(rollout, name, field, dtype='float32')
    known = {name: length for name, length in lengths.items() if length is not None}
    for name, length in known.items():
        first, expected = next(iter(known.items()))
        if length != expected:
            raise InvalidField(f'{field}.{name}', f'must have as many elements as {first}, {expected}, got {length}')
    return prompt_count, next(iter(known.values()), None)


def _length(rollout: Message, name: str, field: str, *, dtype: str) -> int | None:
    """Return the length of a vector; None if it is not set. Its values may be infinite or NaN."""
    if not rollout.HasField(name):
        return None
    data = tensor_data_from_proto(getattr(rollout, name), f'{field}.{name}')
    if data.dtype != dtype:
        raise InvalidField(f'{field}.{name}.dtype', f'must be {dtype}, got {data.dtype}')
    if len(data.shape) != 1:
        raise InvalidField(f'{field}.{name}.shape', f'must have 1 dimension, got {len(data.shape)}')
    return data.shape[0]


def _check_spans(spans: Sequence[sampling_pb2.VersionSpan], token_count: int | None, field: str) -> None:
    end = 0
    for position, span in enumerate(spans):
        if span.version < 0:
            raise InvalidField(f'{field}[{position}].version', f'must be at least 0, got {span.version}')
        if span.begin_token < end:
            problem = f'must be at least {end}, where the previous span ends, got {span.begin_token}'
            raise InvalidField(f'{field}[{position}].begin_token', problem)
        if span.end_token <= span.begin_token:
            problem = f'must be above begin_token, {span.begin_token}, got {span.end_token}'
            raise InvalidField(f'{field}[{position}].end_token', problem)
        end = span.end_token
        if token_count is not None and end > token_count:
            problem = f'must be at most the number of tokens, {token_count}, got {end}'
            raise InvalidField(f'{field}[{position}].end_token', problem)


def _check_roles(chat: Iterable[message_pb2.Message], field: str) -> None:
    for position, message in enumerate(chat):
        if message.role not in message_pb2.Role.values() or not message.role:
            rule = 'must be ROLE_SYSTEM, ROLE_USER, ROLE_ASSISTANT or ROLE_TOOL'
            raise InvalidField(f'{field}[{position}].role', rule)


def _text_of(chat: Sequence[message_pb2.Message]) -> str:
    """Return the beginning of the first message's text; empty if it has none."""
    return ''.join(part.text for message in chat[:1] for part in message.parts)[:PREVIEW_LENGTH]
