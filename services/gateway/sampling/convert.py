"""Sampling requests as orders: parsed once, for routing alone. Their fields are the samplers' to check."""

import asyncio
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import grpc

from services.gateway.fleet.routing import AdapterRequest, RouteKey, block_keys
from services.gateway.fleet.rules import ResidentAdapter
from services.gateway.sampling.rules import MAX_SEQUENCES, BatchOrder, RoutedOrder, SampleOrder
from services.kit.errors import InvalidField
from services.kit.rpc.fields import MAX_ID_LENGTH, duration_from_proto, duration_to_proto, text_from_proto
from twinkle.api.sampler.v1 import engine_pb2, sampling_pb2
from twinkle.api.sampler.v1 import sampler_service_pb2 as wire

MIN_WATCH_INTERVAL = timedelta(milliseconds=100)
MAX_WATCH_INTERVAL = timedelta(hours=1)
_VERSION_WAIT = timedelta(seconds=30)
"""How long a sampler may wait for a version of which it has not heard."""


def sample_order_from_bytes(request: bytes) -> SampleOrder:
    """Return the order that the bytes of a SampleRequest are.

    Raises:
        DecodeError: they are none.
        InvalidField: the request says that another sampler began it, which only the gateway may.
    """
    message = wire.SampleRequest.FromString(request)
    if message.continued:
        raise InvalidField('continued', 'is for services of this deployment; the gateway continues by itself')
    adapter = wish_from_proto(message.adapter) if message.HasField('adapter') else None
    return SampleOrder(
        request=request,
        request_id=text_from_proto(message.request_id, 'request_id', limit=MAX_ID_LENGTH),
        key=RouteKey(
            base_model=message.base_model,
            adapter=adapter,
            blocks=prompt_blocks(message.prompt, base_model=message.base_model, adapter=adapter),
            weight=sequence_count(message.params),
        ),
    )


def batch_order_from_bytes(request: bytes) -> BatchOrder:
    """Return the order that the bytes of a SampleBatchRequest are.

    Raises:
        DecodeError: they are none.
        InvalidField: there is no prompt.
    """
    message = wire.SampleBatchRequest.FromString(request)
    if not message.prompts:
        raise InvalidField('prompts', 'is empty; give at least one')
    adapter = wish_from_proto(message.adapter) if message.HasField('adapter') else None
    weight = sequence_count(message.params)
    blocks = (prompt_blocks(prompt, base_model=message.base_model, adapter=adapter) for prompt in message.prompts)
    return BatchOrder(
        request=request,
        request_id=text_from_proto(message.request_id, 'request_id', limit=MAX_ID_LENGTH),
        keys=tuple(
            RouteKey(base_model=message.base_model, adapter=adapter, blocks=keys, weight=weight) for keys in blocks
        ),
        is_version_open=is_version_open(message.adapter),
    )


def order_for_weights(request: bytes, *, base_model: str, wish: AdapterRequest | None) -> BatchOrder:
    """Return the order of a SampleBatchRequest for these weights; without a base model, for those that it names."""
    if not base_model:
        return batch_order_from_bytes(request)
    message = wire.SampleBatchRequest.FromString(request)
    message.base_model = base_model
    if wish is not None:
        message.adapter.CopyFrom(_wish_to_proto(wish))
    return batch_order_from_bytes(message.SerializeToString())


def score_order_from_bytes(request: bytes) -> BatchOrder:
    """Return the order that the bytes of a ComputeLogprobsRequest are.

    Raises:
        DecodeError: they are none.
        InvalidField: there is no sequence.
    """
    message = wire.ComputeLogprobsRequest.FromString(request)
    if not message.token_ids:
        raise InvalidField('token_ids', 'is empty; give at least one sequence')
    adapter = wish_from_proto(message.adapter) if message.HasField('adapter') else None
    name = adapter.adapter_id if adapter else ''
    return BatchOrder(
        request=request,
        keys=tuple(
            RouteKey(
                base_model=message.base_model,
                adapter=adapter,
                blocks=block_keys(message.base_model, name, tensor.data),
            )
            for tensor in message.token_ids
        ),
        is_scored=True,
        token_count=sum(len(tensor.data) // 4 for tensor in message.token_ids),
        is_version_open=is_version_open(message.adapter),
    )


def load_order_from_bytes(request: bytes) -> RoutedOrder:
    """Return the order that the bytes of a LoadAdapterRequest are.

    Raises:
        DecodeError: they are none.
    """
    message = wire.LoadAdapterRequest.FromString(request)
    key = RouteKey(base_model='', adapter=wish_from_proto(message.adapter))
    return RoutedOrder(method='LoadAdapter', request=request, key=key)


def describe_order_from_bytes(request: bytes) -> RoutedOrder:
    """Return the order that the bytes of a DescribeTokensRequest are.

    Raises:
        DecodeError: they are none.
    """
    message = wire.DescribeTokensRequest.FromString(request)
    return RoutedOrder(method='DescribeTokens', request=request, key=RouteKey(base_model=message.base_model))


def joined_scores(scores: Iterable[tuple[tuple[int, ...], bytes]]) -> bytes:
    """Return one ComputeLogprobsResponse for the answers of several samplers, in request order."""
    answers = list(scores)
    if len(answers) == 1:
        return answers[0][1]
    placed = {
        position: item
        for positions, raw in answers
        for position, item in zip(positions, wire.ComputeLogprobsResponse.FromString(raw).sequences, strict=True)
    }
    return wire.ComputeLogprobsResponse(sequences=[placed[position] for position in sorted(placed)]).SerializeToString()


def dropped_in_all(answers: Iterable[bytes]) -> bytes:
    """Return one ResetPrefixCacheResponse for those of several samplers."""
    counts = (wire.ResetPrefixCacheResponse.FromString(raw).dropped_token_count for raw in answers)
    return wire.ResetPrefixCacheResponse(dropped_token_count=sum(counts)).SerializeToString()


def residents_to_proto(adapters: Iterable[ResidentAdapter], *, next_page_token: str) -> bytes:
    """Return a page of versions."""
    messages = [engine_pb2.ResidentAdapter(**vars(item)) for item in adapters]
    return wire.ListResidentAdaptersResponse(adapters=messages, next_page_token=next_page_token).SerializeToString()


def interval_from_proto(request: wire.WatchLoadRequest) -> timedelta:
    """Return how often the load is to be told.

    Raises:
        InvalidField: more often than every 100 ms, or less than every hour.
    """
    if not request.HasField('interval'):
        return timedelta(seconds=1)
    return duration_from_proto(request.interval, 'interval', least=MIN_WATCH_INTERVAL, most=MAX_WATCH_INTERVAL)


def is_version_open(message: sampling_pb2.AdapterRef) -> bool:
    """Whether samplers may understand different versions by it."""
    is_named = bool(message.adapter_id)
    return is_named and message.WhichOneof('version') in {None, 'at_least'}


def wish_from_proto(message: sampling_pb2.AdapterRef) -> AdapterRequest:
    """Return the weights that are asked for."""
    match message.WhichOneof('version'):
        case 'exact':
            return AdapterRequest(adapter_id=message.adapter_id, exact=message.exact)
        case 'at_least':
            return AdapterRequest(adapter_id=message.adapter_id, at_least=message.at_least)
        case 'checkpoint_path':
            return AdapterRequest(adapter_id=message.checkpoint_path, is_checkpoint=True)
        case _:
            return AdapterRequest(adapter_id=message.adapter_id)


def _wish_to_proto(wish: AdapterRequest) -> sampling_pb2.AdapterRef:
    message = sampling_pb2.AdapterRef(wait_timeout=duration_to_proto(_VERSION_WAIT))
    if wish.is_checkpoint:
        message.checkpoint_path = wish.adapter_id
        return message
    message.adapter_id = wish.adapter_id
    if wish.exact is not None:
        message.exact = wish.exact
    elif wish.at_least is not None:
        message.at_least = wish.at_least
    return message


def prompt_blocks(prompt: sampling_pb2.Prompt, *, base_model: str, adapter: AdapterRequest | None) -> tuple[int, ...]:
    """Return the keys of a prompt's prefixes. Those of a chat grow with its turns."""
    match prompt.WhichOneof('content'):
        case 'token_ids':
            data = prompt.token_ids.data
        case 'text':
            data = prompt.text.encode()
        case _:
            trajectory = prompt.chat.trajectory
            parts = (*trajectory.tools, *trajectory.messages)
            data = b''.join(part.SerializeToString(deterministic=True) for part in parts)
    return block_keys(base_model, adapter.adapter_id if adapter else '', data)


def sequence_count(params: sampling_pb2.SamplingParams) -> int:
    """Return how many sequences a prompt makes; a count that its sampler will refuse is cut to what is legal."""
    return min(max(params.sample_count, 1), MAX_SEQUENCES) if params.HasField('sample_count') else 1


def deadline_of(context: grpc.aio.ServicerContext[Any, Any]) -> float | None:
    """Return when the caller's patience ends, on the event loop's clock; None where it does not."""
    left: Any = context.time_remaining()
    return None if left is None else asyncio.get_running_loop().time() + float(left)
