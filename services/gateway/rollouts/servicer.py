"""Serves `RolloutService`."""

# ruff: noqa: N802 (the methods have the contract's names)

import asyncio
import json

from twinkle.api.gateway.v1 import rollout_service_pb2 as messages
from twinkle.api.gateway.v1 import rollout_service_pb2_grpc
from twinkle_services.gateway.metrics.rules import MAX_STEP, is_metric_name
from twinkle_services.gateway.rollouts import convert
from twinkle_services.gateway.rollouts.rollouts import Rollouts
from twinkle_services.gateway.rollouts.rules import MAX_LISTED_GROUPS, GroupKey, RolloutPage, StoredRollout
from twinkle_services.kit.errors import InvalidPageToken
from twinkle_services.kit.paging import page_token_after, parse_page
from twinkle_services.kit.rpc.call import Context
from twinkle_services.kit.rpc.context import current_caller
from twinkle_services.kit.rpc.fields import id_from_proto, timestamp_to_proto
from twinkle_services.kit.rpc.message_bounds import convert_large


class RolloutServicer(rollout_service_pb2_grpc.RolloutServiceServicer):
    """Implements `RolloutService`."""

    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts = rollouts

    async def LogRollouts(self, request: messages.LogRolloutsRequest, context: Context) -> messages.LogRolloutsResponse:
        run_id, step = id_from_proto(request.run_id, 'run_id'), convert.step_from_proto(request)
        groups = await convert_large(convert.groups_from_proto, request)
        removed = await self._rollouts.log(current_caller(), run_id, step, groups)
        return messages.LogRolloutsResponse(removed_group_count=removed)

    async def ListRollouts(
        self, request: messages.ListRolloutsRequest, context: Context
    ) -> messages.ListRolloutsResponse:
        run_id, wanted = id_from_proto(request.run_id, 'run_id'), convert.filter_from_proto(request)
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
        groups=map(convert.group_to_proto, page.groups),
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
