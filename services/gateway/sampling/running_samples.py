"""Which sampling requests run, under which ids and where: one of a caller's may run in several places."""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from services.gateway.errors import SamplingIdTaken

Result = TypeVar('Result')


@dataclass
class RunningSample:
    """A request of a caller's."""

    parts: dict[str, str] = field(default_factory=dict[str, str])
    """Its parts, by the ids that they have at their replicas, to the addresses of these."""
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the caller ended it."""

    @contextmanager
    def part(self, request_id: str, address: str) -> Iterator[None]:
        """Note, during the block, that a part of it runs at `address`."""
        self.parts[request_id] = address
        try:
            yield
        finally:
            del self.parts[request_id]

    async def unless_aborted(self, work: Coroutine[Any, Any, Result]) -> Result | None:
        """Return what `work` comes to; None as soon as the caller ended the request, and `work` is cancelled."""
        working = asyncio.ensure_future(work)
        aborting = asyncio.ensure_future(self.aborted.wait())
        try:
            await asyncio.wait({working, aborting}, return_when=asyncio.FIRST_COMPLETED)
            return None if self.aborted.is_set() else working.result()
        finally:
            working.cancel()
            aborting.cancel()
            await asyncio.gather(working, aborting, return_exceptions=True)


class RunningSamples:
    """Those that callers named, by caller and name."""

    def __init__(self) -> None:
        """Begin with none."""
        self._named: dict[tuple[str, str], RunningSample] = {}

    @contextmanager
    def running(self, tenant_id: str, request_id: str) -> Iterator[RunningSample]:
        """Note a request during the block; one without a name is nobody's to abort.

        Raises:
            SamplingIdTaken: the tenant has one of that name.
        """
        key = (tenant_id, request_id)
        if key in self._named:
            raise SamplingIdTaken(request_id)
        sample = RunningSample()
        if not request_id:
            yield sample
            return
        self._named[key] = sample
        try:
            yield sample
        finally:
            del self._named[key]

    def find(self, tenant_id: str, request_id: str) -> RunningSample | None:
        """Return the tenant's request of that name, or None."""
        return self._named.get((tenant_id, request_id))
