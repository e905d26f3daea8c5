"""gRPC client of the samplers, the messages that it builds, and the parts of responses that the gateway reads.

Only the fields that failover and accounting need are parsed.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import replace
from typing import Any, cast

from google.protobuf.message import DecodeError

from twinkle.api.sampler.v1 import sampler_service_pb2 as wire
from twinkle.api.sampler.v1 import sampling_pb2
from twinkle.api.tensor.v1 import tensor_pb2
from twinkle_services.gateway.errors import AdapterNotPublished
from twinkle_services.gateway.fleet.convert import load_from_proto, resident_from_proto
from twinkle_services.gateway.fleet.grpc import ReplicaChannels
from twinkle_services.gateway.fleet.rules import ReplicaLoad, ResidentAdapter
from twinkle_services.gateway.fleet.upstreams import GrpcLookups
from twinkle_services.gateway.sampling.rules import (
    BatchPart,
    BatchRequest,
    ChunkKind,
    Progress,
    PromptResult,
    SampleChunk,
    SampleRequest,
)
from twinkle_services.kit.errors import AdapterExpired, AdapterNotFound, DomainError, FieldViolation, ServiceUnreachable
from twinkle_services.kit.ids import new_id
from twinkle_services.kit.paging import MAX_PAGE_SIZE
from twinkle_services.kit.rpc.channel import call_errors, forwarded_metadata
from twinkle_services.kit.rpc.status import ForwardedError

_SERVICE = wire.DESCRIPTOR.services_by_name['SamplerService'].full_name


class SamplerClient:
    """Calls samplers on behalf of the current caller.

    Addresses are 'host:port' of a replica; deadlines are times on the event loop's clock, or None. Except for `abort`,
    calls raise the sampler's error as a DomainError, or ServiceUnreachable if the connection was refused or lost.
    Closing a generator cancels its call. `lookups` finds adapters that have no published version.
    """

    def __init__(self, channels: ReplicaChannels, lookups: GrpcLookups, *, internal_token: str) -> None:
        self._channels = channels
        self._lookups = lookups
        self._internal_token = internal_token

    async def sample(
        self, address: str, request: SampleRequest, *, progress: Progress, deadline: float | None
    ) -> AsyncGenerator[SampleChunk, None]:
        """Yield the response, or the rest of it after `progress`."""
        is_changed = progress.has_tokens or request.is_renamed
        message = continued_request(request, progress) if is_changed else request.message
        raws = self._stream(address, 'Sample', message, deadline=deadline, is_internal=progress.has_tokens)
        async with aclosing(raws):
            async for raw in raws:
                yield chunk_from_bytes(raw)

    async def complete(
        self, address: str, part: BatchPart, *, deadline: float | None
    ) -> AsyncGenerator[PromptResult, None]:
        """Yield the results of a part of a SampleBatch, in the order in which they finish."""
        missing = set(range(len(part.positions)))
        raws = self._stream(address, 'SampleBatch', batch_message(part), deadline=deadline)
        with _indices_of(part):
            async with aclosing(raws):
                async for raw in raws:
                    message = wire.SampleBatchResponse.FromString(raw)
                    index = message.prompt_index
                    if index not in missing:
                        raise ServiceUnreachable('sampler')
                    missing.discard(index)
                    yield prompt_result(raw, message, part.positions[index])

    async def score(self, address: str, part: BatchPart, *, deadline: float | None) -> bytes:
        """Return the ComputeLogprobsResponse for a part of a batch."""
        with _indices_of(part):
            return await self.call(address, 'ComputeLogprobs', score_message(part), deadline=deadline)

    async def resolve(self, address: str, request: BatchRequest, *, deadline: float | None) -> int:
        """Load the adapter of a batch at the replica and return the version that the replica chose."""
        adapter = adapter_of(request.message, is_scored=request.is_scored)
        message = wire.LoadAdapterRequest(adapter=adapter).SerializeToString()
        raw = await self.call(address, 'LoadAdapter', message, deadline=deadline)
        return wire.LoadAdapterResponse.FromString(raw).adapter.version

    async def call(self, address: str, method: str, message: bytes, *, deadline: float | None) -> bytes:
        """Call a unary method, such as 'Pause', and return its response."""
        channel = await self._channels.connected(address)
        call = cast(Any, channel).unary_unary(f'/{_SERVICE}/{method}')
        metadata = forwarded_metadata(self._internal_token)
        try:
            with call_errors('sampler'):
                return await call(message, timeout=_seconds_until(deadline), metadata=metadata)
        except DomainError as error:
            await self._check_published(error)
            raise

    async def abort(self, address: str, request_id: str) -> bool:
        """Abort a request on a replica, and return whether the replica ran the request; False if the call failed."""
        message = wire.AbortRequest(request_id=request_id).SerializeToString()
        with suppress(DomainError):
            await self.call(address, 'Abort', message, deadline=None)
            return True
        return False

    async def resident_adapters(self, address: str, *, deadline: float | None) -> list[ResidentAdapter]:
        """Return all adapter versions of the caller at the replica."""
        found: list[ResidentAdapter] = []
        token = ''
        while True:
            message = wire.ListResidentAdaptersRequest(page_size=MAX_PAGE_SIZE, page_token=token).SerializeToString()
            raw = await self.call(address, 'ListResidentAdapters', message, deadline=deadline)
            page = wire.ListResidentAdaptersResponse.FromString(raw)
            found += map(resident_from_proto, page.adapters)
            token = page.next_page_token
            if not token:
                return found

    async def load(self, address: str, *, deadline: float | None) -> ReplicaLoad:
        raw = await self.call(address, 'GetLoad', b'', deadline=deadline)
        return load_from_proto(wire.GetLoadResponse.FromString(raw).load)

    async def _stream(
        self, address: str, method: str, message: bytes, *, deadline: float | None, is_internal: bool = False
    ) -> AsyncGenerator[bytes, None]:
        channel = await self._channels.connected(address)
        metadata = forwarded_metadata(self._internal_token, is_internal=is_internal)
        start = cast(Any, channel).unary_stream(f'/{_SERVICE}/{method}')
        call = start(message, timeout=_seconds_until(deadline), metadata=metadata)
        try:
            with call_errors('sampler'):
                async for raw in call:
                    yield raw
        except DomainError as error:
            await self._check_published(error)
            raise
        finally:
            call.cancel()

    async def _check_published(self, error: DomainError) -> None:
        """Raise a more specific error if the adapter that a sampler does not know is unpublished or has expired."""
        if error.reason != AdapterNotFound.reason:
            return
        adapter_id = error.metadata().get('adapterId', '')
        try:
            await self._lookups.adapter(adapter_id)
        except DomainError as refusal:
            if refusal.reason == AdapterExpired.reason:
                raise
            return
        raise AdapterNotPublished(adapter_id) from error


@contextmanager
def _indices_of(part: BatchPart) -> Iterator[None]:
    """Replace the prompt indices in errors that the block raises with the indices in the caller's batch."""
    try:
        yield
    except DomainError as error:
        raise renumbered_error(error, part) from error


def _seconds_until(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - asyncio.get_running_loop().time(), 0.0)


def chunk_from_bytes(raw: bytes) -> SampleChunk:
    """Return the chunk in a serialized SampleResponse.

    Raises:
        ServiceUnreachable: the bytes are not such a message, so the peer is not a sampler.
    """
    try:
        message = wire.SampleResponse.FromString(raw)
    except DecodeError as error:
        raise ServiceUnreachable('sampler') from error
    if message.HasField('delta'):
        delta = message.delta
        return SampleChunk(raw, ChunkKind.DELTA, delta.sequence_index, delta.token_ids.data, delta.version)
    if message.HasField('finished'):
        return SampleChunk(raw, ChunkKind.FINISHED, message.finished.sequence_index)
    return SampleChunk(raw, ChunkKind.PROMPT, prompt_token_count=token_count(message.prompt.token_ids))


def prompt_result(raw: bytes, message: wire.SampleBatchResponse, position: int) -> PromptResult:
    """Return the result in a SampleBatchResponse, given the index of its prompt in the batch."""
    if position != message.prompt_index:
        # Parsers use a field's last value. Index 0 serializes to no bytes, so its field is written by hand.
        raw += wire.SampleBatchResponse(prompt_index=position).SerializeToString() or b'\x08\x00'
    return PromptResult(
        position,
        raw,
        prompt_token_count=token_count(message.prompt.token_ids),
        sampled_token_count=sum(token_count(sequence.token_ids) for sequence in message.sequences),
    )


def token_count(tensor: tensor_pb2.Tensor) -> int:
    """Return the number of tokens in an int32 tensor."""
    return len(tensor.data) // 4


def continued_request(request: SampleRequest, progress: Progress) -> bytes:
    """Return the message that continues a request after the delivered tokens, or restarts it before the first token.

    A continuation names the version that sampled the delivered tokens. The message has the id of `request`. This
    id is new, because an earlier attempt may still run under the previous id.
    """
    message = wire.SampleRequest.FromString(request.message)
    message.request_id = request.request_id
    if not progress.has_tokens:
        return message.SerializeToString()
    _fix_version(message, progress.version)
    del message.continued[:]
    for index, sequence in enumerate(progress.sequences):
        token_ids = tensor_pb2.Tensor(
            dtype=tensor_pb2.DTYPE_INT32, shape=[len(sequence.token_data) // 4], data=bytes(sequence.token_data)
        )
        message.continued.add(sequence_index=index, token_ids=token_ids, is_finished=sequence.is_finished)
    return message.SerializeToString()


def batch_message(part: BatchPart) -> bytes:
    """Return the SampleBatchRequest of a part; the unchanged bytes of the batch if no field differs."""
    if part.is_complete and not part.request_id and part.version is None:
        return part.request.message
    message = wire.SampleBatchRequest.FromString(part.request.message)
    if part.request_id:
        message.request_id = part.request_id
    _fix_version(message, part.version)
    if not part.is_complete:
        prompts = [message.prompts[position] for position in part.positions]
        copy = wire.SampleBatchRequest(
            request_id=message.request_id, base_model=message.base_model, prompts=prompts, params=message.params
        )
        if message.HasField('adapter'):
            copy.adapter.CopyFrom(message.adapter)
        message = copy
    return message.SerializeToString()


def score_message(part: BatchPart) -> bytes:
    """Return the ComputeLogprobsRequest of a part; the unchanged bytes of the batch if no field differs."""
    if part.is_complete and part.version is None:
        return part.request.message
    message = wire.ComputeLogprobsRequest.FromString(part.request.message)
    _fix_version(message, part.version)
    if not part.is_complete:
        sequences = [message.token_ids[position] for position in part.positions]
        copy = wire.ComputeLogprobsRequest(base_model=message.base_model, token_ids=sequences)
        if message.HasField('adapter'):
            copy.adapter.CopyFrom(message.adapter)
        if message.HasField('top_logprob_count'):
            copy.top_logprob_count = message.top_logprob_count
        message = copy
    return message.SerializeToString()


def adapter_of(message: bytes, *, is_scored: bool) -> sampling_pb2.AdapterRef:
    """Return the adapter reference of a batch."""
    kind = wire.ComputeLogprobsRequest if is_scored else wire.SampleBatchRequest
    return kind.FromString(message).adapter


def renumbered_error(error: DomainError, part: BatchPart) -> DomainError:
    """Return a sampler's error about a part, with field paths that use the indices of the batch."""
    if not isinstance(error, ForwardedError) or part.is_complete:
        return error
    name = 'token_ids' if part.request.is_scored else 'prompts'

    def renumber(path: str) -> str:
        found = re.match(rf'{name}\[(\d{{1,9}})\]', path)
        if found is None or int(found[1]) >= len(part.positions):
            return path
        return f'{name}[{part.positions[int(found[1])]}]{path[found.end() :]}'

    return replace(
        error,
        # The message of an error about a field begins with the path of the field.
        message=renumber(error.message),
        facts={key: renumber(value) if key == 'field' else value for key, value in error.facts.items()},
        fields=tuple(FieldViolation(renumber(item.field), item.problem) for item in error.fields),
    )


def aborted_chunks(progress: Progress) -> Iterator[SampleChunk]:
    """Yield the final chunks of the open sequences of a request that was aborted while no replica ran it."""
    for index, sequence in enumerate(progress.sequences):
        if sequence.is_finished:
            continue
        count, version = len(sequence.token_data) // 4, progress.version or 0
        spans = [sampling_pb2.VersionSpan(version=version, begin_token=0, end_token=count)] if count else []
        finished = sampling_pb2.SequenceFinished(
            sequence_index=index,
            stop_reason=sampling_pb2.STOP_REASON_ABORT,
            sequence_id=new_id('sq'),
            version_spans=spans,
        )
        message = wire.SampleResponse(finished=finished).SerializeToString()
        yield SampleChunk(message, ChunkKind.FINISHED, index)


def aborted_results(part: BatchPart) -> Iterator[PromptResult]:
    """Yield the result of each prompt of a part that was aborted before a replica received it."""
    message = wire.SampleBatchRequest.FromString(part.request.message)
    no_tokens = tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_INT32, shape=[0])
    for position in part.positions:
        prompt = message.prompts[position]
        has_tokens = prompt.WhichOneof('content') == 'token_ids'
        response = wire.SampleBatchResponse(
            prompt_index=position,
            prompt=sampling_pb2.PromptInfo(token_ids=prompt.token_ids if has_tokens else no_tokens),
        )
        for _ in range(part.request.keys[position].weight):
            response.sequences.add(
                sequence_id=new_id('sq'),
                stop_reason=sampling_pb2.STOP_REASON_ABORT,
                token_ids=no_tokens,
                logprobs=tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_FLOAT32, shape=[0]),
            )
        yield PromptResult(position, response.SerializeToString())


def _fix_version(
    message: wire.SampleRequest | wire.SampleBatchRequest | wire.ComputeLogprobsRequest, version: int | None
) -> None:
    """Set the exact version of the adapter; base models and checkpoint paths have no version."""
    is_adapter = message.HasField('adapter') and message.adapter.WhichOneof('version') != 'checkpoint_path'
    if is_adapter and version is not None:
        message.adapter.exact = version
