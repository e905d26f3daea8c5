"""Requests and responses of the sampler contract. Requests are parsed once, for routing; samplers check the fields.

Every `x_from_bytes` raises DecodeError for bytes that are not such a message.
"""

import asyncio
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from twinkle.api.model.v1 import training_service_pb2
from twinkle.api.sampler.v1 import engine_pb2, sampling_pb2
from twinkle.api.sampler.v1 import sampler_service_pb2 as wire
from twinkle.data_format import base_model_id
from twinkle_services.gateway.fleet.rules import ResidentAdapter
from twinkle_services.gateway.fleet.sampler_choice import AdapterRequest, RouteKey, block_keys
from twinkle_services.gateway.sampling.rules import (
    MAX_DELIVERED_TOKENS,
    MAX_SEQUENCES,
    BatchRequest,
    DeliveredSequence,
    RoutedRequest,
    SampleRequest,
)
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.rpc.call import Context
from twinkle_services.kit.rpc.fields import MAX_ID_LENGTH, duration_from_proto, duration_to_proto, text_from_proto
from twinkle_services.kit.rpc.tensors import tensor_from_proto

MIN_WATCH_INTERVAL = timedelta(milliseconds=100)
MAX_WATCH_INTERVAL = timedelta(hours=1)
_VERSION_WAIT = timedelta(seconds=30)
"""Maximum wait of a sampler for a version that has not been announced to the sampler yet."""


def sample_request_from_bytes(raw: bytes, message: wire.SampleRequest | None = None) -> SampleRequest:
    """Return the request in a serialized SampleRequest; callers that have the parsed message pass it too.

    Raises:
        InvalidField: the request id or the delivered part of a continued request is invalid, or the request cannot be
            continued.
    """
    message = wire.SampleRequest.FromString(raw) if message is None else message
    adapter = adapter_from_proto(message.adapter) if message.HasField('adapter') else None
    return SampleRequest(
        message=raw,
        request_id=text_from_proto(message.request_id, 'request_id', limit=MAX_ID_LENGTH),
        key=RouteKey(
            base_model=base_model_id(message.base_model),
            adapter=adapter,
            blocks=prompt_blocks(message.prompt, base_model=message.base_model, adapter=adapter),
            weight=sequence_count(message.params),
        ),
        delivered=_delivered(message) if message.continued else (),
        prompt_token_count=len(message.prompt.token_ids.data) // 4,
    )


def _delivered(message: wire.SampleRequest) -> tuple[DeliveredSequence, ...]:
    """Return the sequences that the client received before it lost the connection."""
    if message.prompt.WhichOneof('content') != 'token_ids':
        raise InvalidField('prompt.token_ids', 'must be set with `continued`; the `prompt` event contains the tokens')
    if message.HasField('adapter') and message.adapter.WhichOneof('version') != 'exact':
        raise InvalidField('adapter.exact', 'must be set with `continued`: versions cannot be mixed')
    _check_can_continue(message.params)
    delivered_count = sum(len(entry.token_ids.data) for entry in message.continued) // 4
    if delivered_count > MAX_DELIVERED_TOKENS:
        problem = f'has {delivered_count} tokens, the limit is {MAX_DELIVERED_TOKENS}; sample the request again'
        raise InvalidField('continued', problem)
    count = sequence_count(message.params)
    if len(message.continued) != count:
        raise InvalidField('continued', f'has {len(message.continued)} entries, must have {count}: one per sequence')
    for index, entry in enumerate(message.continued):
        if entry.sequence_index != index:
            raise InvalidField(f'continued[{index}].sequence_index', f'must be {index}, got {entry.sequence_index}')
        if entry.HasField('token_ids'):
            tensor_from_proto(entry.token_ids, f'continued[{index}].token_ids', dtypes=('int32',), dimensions=1)
    return tuple(DeliveredSequence(bytearray(entry.token_ids.data), entry.is_finished) for entry in message.continued)


def _check_can_continue(params: sampling_pb2.SamplingParams) -> None:
    """Check that a client may continue a request: results of the prompt and structured output cannot be continued."""
    reported = 'cannot be set with `continued`: the first request reports it; leave it out, or sample the request again'
    if params.HasField('structured_output'):
        raise InvalidField('params.structured_output', 'cannot be set with `continued`; sample the request again')
    if params.is_prompt_logprobs_returned:
        raise InvalidField('params.is_prompt_logprobs_returned', reported)
    if params.prompt_top_logprob_count:
        raise InvalidField('params.prompt_top_logprob_count', reported)
    if params.HasField('prompt_probe'):
        raise InvalidField('params.prompt_probe', reported)


def batch_request_from_bytes(raw: bytes, message: wire.SampleBatchRequest | None = None) -> BatchRequest:
    """Return the request in a serialized SampleBatchRequest; callers that have the parsed message pass it too.

    Raises:
        InvalidField: the batch has no prompts, or its request id is invalid.
    """
    message = wire.SampleBatchRequest.FromString(raw) if message is None else message
    if not message.prompts:
        raise InvalidField('prompts', 'is empty; give at least one')
    adapter = adapter_from_proto(message.adapter) if message.HasField('adapter') else None
    weight = sequence_count(message.params)
    blocks = (prompt_blocks(prompt, base_model=message.base_model, adapter=adapter) for prompt in message.prompts)
    return BatchRequest(
        message=raw,
        request_id=text_from_proto(message.request_id, 'request_id', limit=MAX_ID_LENGTH),
        keys=tuple(
            RouteKey(base_model=base_model_id(message.base_model), adapter=adapter, blocks=keys, weight=weight)
            for keys in blocks
        ),
        is_version_open=is_version_open(message.adapter),
    )


def batch_request_for_weights(raw: bytes, *, base_model: str, adapter: AdapterRequest | None) -> BatchRequest:
    """Return the request in a serialized SampleBatchRequest. Set the given weights unless `base_model` is empty."""
    message = wire.SampleBatchRequest.FromString(raw)
    if base_model:
        message.base_model = base_model
        if adapter is not None:
            message.adapter.CopyFrom(_adapter_to_proto(adapter))
        raw = message.SerializeToString()
    return batch_request_from_bytes(raw, message)


def score_request_from_bytes(raw: bytes) -> BatchRequest:
    """Return the request in a serialized ComputeLogprobsRequest.

    Raises:
        InvalidField: the request has no sequences.
    """
    message = wire.ComputeLogprobsRequest.FromString(raw)
    if not message.token_ids:
        raise InvalidField('token_ids', 'is empty; give at least one sequence')
    adapter = adapter_from_proto(message.adapter) if message.HasField('adapter') else None
    name = adapter.adapter_id if adapter else ''
    return BatchRequest(
        message=raw,
        keys=tuple(
            RouteKey(
                base_model=base_model_id(message.base_model),
                adapter=adapter,
                blocks=block_keys(message.base_model, name, tensor.data),
            )
            for tensor in message.token_ids
        ),
        is_scored=True,
        token_count=sum(len(tensor.data) // 4 for tensor in message.token_ids),
        is_version_open=is_version_open(message.adapter),
    )


def load_request_from_bytes(raw: bytes) -> RoutedRequest:
    key = RouteKey(base_model='', adapter=adapter_from_proto(wire.LoadAdapterRequest.FromString(raw).adapter))
    return RoutedRequest(method='LoadAdapter', message=raw, key=key)


def describe_request_from_bytes(raw: bytes) -> RoutedRequest:
    key = RouteKey(base_model=base_model_id(wire.DescribeTokensRequest.FromString(raw).base_model))
    return RoutedRequest(method='DescribeTokens', message=raw, key=key)


def join_scores(scores: Iterable[tuple[tuple[int, ...], bytes]]) -> bytes:
    """Merge the ComputeLogprobsResponses of several samplers into one, in the order of the request."""
    responses = list(scores)
    if len(responses) == 1:
        return responses[0][1]
    by_position = {
        position: item
        for positions, raw in responses
        for position, item in zip(positions, wire.ComputeLogprobsResponse.FromString(raw).sequences, strict=True)
    }
    sequences = [by_position[position] for position in sorted(by_position)]
    return wire.ComputeLogprobsResponse(sequences=sequences).SerializeToString()


def join_resets(responses: Iterable[bytes]) -> bytes:
    """Merge the ResetPrefixCacheResponses of several samplers into one."""
    counts = (wire.ResetPrefixCacheResponse.FromString(raw).dropped_token_count for raw in responses)
    return wire.ResetPrefixCacheResponse(dropped_token_count=sum(counts)).SerializeToString()


def residents_to_proto(adapters: Iterable[ResidentAdapter], *, next_page_token: str) -> bytes:
    """Return a serialized page of adapter versions."""
    messages = [engine_pb2.ResidentAdapter(**vars(item)) for item in adapters]
    return wire.ListResidentAdaptersResponse(adapters=messages, next_page_token=next_page_token).SerializeToString()


def published_version(result: bytes) -> int:
    """Return the version that a future published, from its result."""
    return training_service_pb2.ExecuteResponse.FromString(result).result.publish.version


def interval_from_proto(request: wire.WatchLoadRequest) -> timedelta:
    """Return the interval between load reports; the default is one second.

    Raises:
        InvalidField: the interval is below 100 ms or above one hour.
    """
    if not request.HasField('interval'):
        return timedelta(seconds=1)
    return duration_from_proto(request.interval, 'interval', minimum=MIN_WATCH_INTERVAL, maximum=MAX_WATCH_INTERVAL)


def is_version_open(message: sampling_pb2.AdapterRef) -> bool:
    """Return whether different samplers may resolve the reference to different versions."""
    return bool(message.adapter_id) and message.WhichOneof('version') in {None, 'at_least'}


def adapter_from_proto(message: sampling_pb2.AdapterRef) -> AdapterRequest:
    """Return the weights that the reference names."""
    match message.WhichOneof('version'):
        case 'exact':
            return AdapterRequest(adapter_id=message.adapter_id, exact=message.exact)
        case 'at_least':
            return AdapterRequest(adapter_id=message.adapter_id, at_least=message.at_least)
        case 'checkpoint_path':
            return AdapterRequest(adapter_id=message.checkpoint_path, is_checkpoint=True)
        case _:
            return AdapterRequest(adapter_id=message.adapter_id)


def _adapter_to_proto(adapter: AdapterRequest) -> sampling_pb2.AdapterRef:
    message = sampling_pb2.AdapterRef(wait_timeout=duration_to_proto(_VERSION_WAIT))
    if adapter.is_checkpoint:
        message.checkpoint_path = adapter.adapter_id
        return message
    message.adapter_id = adapter.adapter_id
    if adapter.exact is not None:
        message.exact = adapter.exact
    elif adapter.at_least is not None:
        message.at_least = adapter.at_least
    return message


def prompt_blocks(prompt: sampling_pb2.Prompt, *, base_model: str, adapter: AdapterRequest | None) -> tuple[int, ...]:
    """Return the keys of a prompt's prefixes. A new turn of a chat does not change the keys of earlier full blocks."""
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
    """Return the number of sequences per prompt, clamped to the legal range; the sampler refuses other numbers."""
    return min(max(params.sample_count, 1), MAX_SEQUENCES) if params.HasField('sample_count') else 1


def deadline_of(context: Context) -> float | None:
    """Return the deadline of a call on the event loop's clock; None for no deadline."""
    remaining: Any = context.time_remaining()
    return None if remaining is None else asyncio.get_running_loop().time() + float(remaining)
