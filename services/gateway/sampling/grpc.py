"""Calls to samplers: bytes out as they came in, answers parsed just far enough to know what was delivered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager, suppress
from typing import Any, cast

import grpc

from services.gateway.fleet.convert import load_from_proto, resident_from_proto
from services.gateway.fleet.grpc import ReplicaChannels
from services.gateway.fleet.rules import ReplicaLoad, ResidentAdapter
from services.gateway.sampling.rules import BatchOrder, Piece, Progress, PromptAnswer, SampleOrder, Share
from services.gateway.sampling.sampler_messages import (
    aborted_answers,
    aborted_end,
    adapter_of,
    batch_request,
    continued_request,
    piece_from_bytes,
    placed_error,
    prompt_answer,
    score_request,
)
from services.kit.errors import DomainError, ServiceUnreachable
from services.kit.paging import MAX_PAGE_SIZE
from services.kit.rpc.channel import forwarded_metadata
from services.kit.rpc.status import error_from_call
from twinkle.api.sampler.v1 import sampler_service_pb2 as wire

_SERVICE = wire.DESCRIPTOR.services_by_name['SamplerService'].full_name


class GrpcSamplers:
    """Implements `ports.Samplers`."""

    def __init__(self, channels: ReplicaChannels, *, internal_token: str) -> None:
        """Call over `channels`, which the caller closes."""
        self._channels = channels
        self._internal_token = internal_token

    async def sample(
        self, address: str, order: SampleOrder, *, progress: Progress, deadline: float | None
    ) -> AsyncGenerator[Piece, None]:
        """Yield the answer, or what is missing of it after `progress`.

        Raises:
            DomainError: the sampler's own error.
            ServiceUnreachable: the connection was refused or lost.
        """
        request = order.request
        if progress.has_tokens or order.is_renamed:
            request = continued_request(order, progress)
        raws = self._stream(address, 'Sample', request, deadline=deadline, is_internal=progress.has_tokens)
        async with aclosing(raws):
            async for raw in raws:
                yield piece_from_bytes(raw)

    async def complete(
        self, address: str, share: Share, *, deadline: float | None
    ) -> AsyncGenerator[PromptAnswer, None]:
        """Yield the answers of a share of a SampleBatch, as they are finished.

        Raises:
            DomainError: as `sample`.
        """
        missing = set(range(len(share.positions)))
        raws = self._stream(address, 'SampleBatch', batch_request(share), deadline=deadline)
        with _places_of(share):
            async with aclosing(raws):
                async for raw in raws:
                    message = wire.SampleBatchResponse.FromString(raw)
                    index = message.prompt_index
                    if index not in missing:
                        raise ServiceUnreachable('sampler')
                    missing.discard(index)
                    yield prompt_answer(raw, message, share.positions[index])

    async def score(self, address: str, share: Share, *, deadline: float | None) -> bytes:
        """Return the answer of a share of a ComputeLogprobs.

        Raises:
            DomainError: as `sample`.
        """
        with _places_of(share):
            return await self.call(address, 'ComputeLogprobs', score_request(share), deadline=deadline)

    async def resolve(self, address: str, order: BatchOrder, *, deadline: float | None) -> int:
        """Return the version that a batch means at this replica, which holds it from then on.

        Raises:
            DomainError: as `sample`.
        """
        # Both kinds of batches have the adapter in a field of that name.
        adapter = adapter_of(order.request, is_scored=order.is_scored)
        request = wire.LoadAdapterRequest(adapter=adapter).SerializeToString()
        raw = await self.call(address, 'LoadAdapter', request, deadline=deadline)
        return wire.LoadAdapterResponse.FromString(raw).adapter.version

    async def call(self, address: str, method: str, request: bytes, *, deadline: float | None) -> bytes:
        """Return the answer of a method that has one.

        Raises:
            DomainError: as `sample`.
        """
        channel = await self._channels.connected(address)
        call = cast(Any, channel).unary_unary(f'/{_SERVICE}/{method}')(
            request, timeout=_seconds_until(deadline), metadata=forwarded_metadata(self._internal_token)
        )
        try:
            response: bytes = await call
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error, service='sampler') from error
        except grpc.aio.UsageError as error:
            raise ServiceUnreachable('sampler') from error
        return response

    async def abort(self, address: str, request_id: str) -> bool:
        """End a request and return whether it was running there; one that cannot be reached is no error."""
        request = wire.AbortRequest(request_id=request_id).SerializeToString()
        with suppress(DomainError):
            await self.call(address, 'Abort', request, deadline=None)
            return True
        return False

    async def resident_adapters(self, address: str, *, deadline: float | None) -> list[ResidentAdapter]:
        """Return the caller's versions there, all pages.

        Raises:
            DomainError: as `sample`.
        """
        found: list[ResidentAdapter] = []
        token = ''
        while True:
            request = wire.ListResidentAdaptersRequest(page_size=MAX_PAGE_SIZE, page_token=token).SerializeToString()
            raw = await self.call(address, 'ListResidentAdapters', request, deadline=deadline)
            page = wire.ListResidentAdaptersResponse.FromString(raw)
            found += [resident_from_proto(item) for item in page.adapters]
            token = page.next_page_token
            if not token:
                return found

    async def load(self, address: str, *, deadline: float | None) -> ReplicaLoad:
        """Return how busy a replica is.

        Raises:
            DomainError: as `sample`.
        """
        raw = await self.call(address, 'GetLoad', b'', deadline=deadline)
        return load_from_proto(wire.GetLoadResponse.FromString(raw).load)

    def aborted(self, progress: Progress) -> list[Piece]:
        """Return the ends of sequences that were aborted while no replica had them."""
        return [
            piece_from_bytes(aborted_end(index, sequence, version=progress.version or 0))
            for index, sequence in enumerate(progress.sequences)
            if not sequence.is_finished
        ]

    def aborted_prompts(self, share: Share) -> list[PromptAnswer]:
        """Return the answers of a share of a SampleBatch that was aborted while no replica had it."""
        return [PromptAnswer(position, raw) for position, raw in aborted_answers(share)]

    async def _stream(
        self, address: str, method: str, request: bytes, *, deadline: float | None, is_internal: bool = False
    ) -> AsyncGenerator[bytes, None]:
        channel = await self._channels.connected(address)
        metadata = forwarded_metadata(self._internal_token, is_internal=is_internal)
        start = cast(Any, channel).unary_stream(f'/{_SERVICE}/{method}')
        call = start(request, timeout=_seconds_until(deadline), metadata=metadata)
        try:
            async for raw in call:
                yield raw
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error, service='sampler') from error
        except grpc.aio.UsageError as error:
            # The channel was closed: the fleet has forgotten the address.
            raise ServiceUnreachable('sampler') from error
        finally:
            call.cancel()


@contextmanager
def _places_of(share: Share) -> Iterator[None]:
    """Let errors that are raised in the block name prompts by their places in the caller's batch."""
    try:
        yield
    except DomainError as error:
        raise placed_error(error, share) from error


def _seconds_until(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - asyncio.get_running_loop().time(), 0.0)
