"""A sampler of the configuration: it holds no lease, so it is asked how it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace

import grpc

from services.gateway.fleet.convert import load_from_proto
from services.gateway.fleet.rules import ReplicaLoad, ReplicaReport
from services.kit.rpc.status import error_from_call
from twinkle.api.sampler.v1 import sampler_service_pb2, sampler_service_pb2_grpc
from twinkle.api.server.v1 import server_service_pb2, server_service_pb2_grpc

ANSWER_SECONDS = 2.0
"""How long it may take to answer before it counts as out of reach."""


class GrpcStaticSampler:
    """Implements `ports.SamplerFacts`."""

    def __init__(
        self,
        report: ReplicaReport,
        *,
        channel: grpc.aio.Channel,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Ask over `channel`, opened with the internal identity; `report` says what nobody needs to ask for."""
        self._report = report
        self._server = server_service_pb2_grpc.ServerServiceStub(channel)
        self._sampler = sampler_service_pb2_grpc.SamplerServiceStub(channel)
        self._pause = pause

    async def follow(self) -> AsyncGenerator[ReplicaReport, None]:
        """Yield what it says of itself, at once and about every second.

        Raises:
            DomainError: it cannot be reached any more.
        """
        while True:
            try:
                yield replace(self._report, base_models=await self._base_models(), load=await self._load())
            except grpc.aio.AioRpcError as error:
                raise error_from_call(error, service='sampler') from error
            await self._pause(1.0)

    async def _base_models(self) -> tuple[str, ...]:
        answer = await self._server.GetServerInfo(server_service_pb2.GetServerInfoRequest(), timeout=ANSWER_SECONDS)
        return tuple(model.base_model for info in answer.services for model in info.base_models if model.is_sampleable)

    async def _load(self) -> ReplicaLoad | None:
        try:
            answer = await self._sampler.GetLoad(sampler_service_pb2.GetLoadRequest(), timeout=ANSWER_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return None
            raise
        return load_from_proto(answer.load)
