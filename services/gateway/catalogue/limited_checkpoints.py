"""The checkpoint service for tenants whose storage has a quota."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta

import grpc

from services.gateway.catalogue.grpc_checkpoints import GrpcCheckpoints
from services.gateway.catalogue.rules import Checkpoint, UploadOrder
from services.kit.rpc.context import current_caller


class LimitedCheckpoints(GrpcCheckpoints):
    """Stores nothing more for a tenant that stores as much as it may; all else is as without a quota."""

    def __init__(
        self, channel: grpc.aio.Channel | None, *, internal_token: str, check: Callable[[str], Awaitable[None]]
    ) -> None:
        """Call over a bare channel; `check` raises QuotaExceeded for a tenant whose storage is full."""
        super().__init__(channel, internal_token=internal_token)
        self._check = check

    async def copy(self, path: str, *, run_id: str, name: str, ttl: timedelta | None) -> Checkpoint:
        """Return a copy of one that the caller may read.

        Raises:
            QuotaExceeded: the caller's tenant stores as much as it may.
        """
        await self._check(current_caller().tenant_id)
        return await super().copy(path, run_id=run_id, name=name, ttl=ttl)

    async def upload(self, order: UploadOrder, pieces: AsyncIterator[bytes], *, offset: int) -> Checkpoint:
        """Return the checkpoint that an archive became.

        Raises:
            QuotaExceeded: the caller's tenant stores as much as it may.
        """
        await self._check(current_caller().tenant_id)
        return await super().upload(order, pieces, offset=offset)
