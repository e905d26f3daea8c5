"""Sampling requests that run: their ids, the replicas that run their parts, and whether the caller aborted them."""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from services.gateway.errors import SamplingIdTaken

Result = TypeVar('Result')


@dataclass
class RunningRequest:
    """One request of a caller. Several replicas may run parts of it."""

    parts: dict[str, str] = field(default_factory=dict[str, str])
    """Addresses of the replicas, by the ids that the parts have there."""
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the caller aborts the request."""

    @contextmanager
    def part(self, request_id: str, address: str) -> Iterator[None]:
        """Record, for the duration of the block, that a part runs at `address`."""
        self.parts[request_id] = address
        try:
            yield
        finally:
            del self.parts[request_id]

    async def unless_aborted(self, work: Coroutine[Any, Any, Result]) -> Result | None:
        """Return the result of `work`; cancel it and return None as soon as the request is aborted."""
        working = asyncio.ensure_future(work)
        aborting = asyncio.ensure_future(self.aborted.wait())
        try:
            await asyncio.wait({working, aborting}, return_when=asyncio.FIRST_COMPLETED)
            return None if self.aborted.is_set() else working.result()
        finally:
            working.cancel()
            aborting.cancel()
            await asyncio.gather(working, aborting, return_exceptions=True)


class RunningRequests:
    """Running requests by tenant and the id that the caller chose."""

    def __init__(self) -> None:
        self._named: dict[tuple[str, str], RunningRequest] = {}

    @contextmanager
    def running(self, tenant_id: str, request_id: str) -> Iterator[RunningRequest]:
        """Register a request for the duration of the block. A request without an id cannot be found.

        Raises:
            SamplingIdTaken: A request of the tenant with that id is running.
        """
        key = (tenant_id, request_id)
        if key in self._named:
            raise SamplingIdTaken(request_id)
        request = RunningRequest()
        if not request_id:
            yield request
            return
        self._named[key] = request
        try:
            yield request
        finally:
            del self._named[key]

    def find(self, tenant_id: str, request_id: str) -> RunningRequest | None:
        """Return the tenant's request of that id, or None."""
        return self._named.get((tenant_id, request_id))
