"""Register of running requests by tenant and id, so that they can be found and aborted."""

import asyncio
from dataclasses import dataclass, field

from twinkle_services.sampler.domain.errors import RequestIdTaken, RequestNotFound


@dataclass(eq=False, kw_only=True)
class RunningRequest:
    """A sampling call that is being served."""

    tenant_id: str
    request_id: str
    is_aborted: bool = False
    """Whether the request was aborted; prompts of the request that wait for a slot then end without running."""
    engine_request_ids: set[str] = field(default_factory=set[str])
    """Engine ids of the prompts that are running in the engine."""
    slot_waiters: list[asyncio.Future[None]] = field(default_factory=list[asyncio.Future[None]])
    """One future for each prompt that waits for a slot."""


class RunningRequests:
    """All running requests of one sampler."""

    def __init__(self) -> None:
        self._requests: dict[tuple[str, str], RunningRequest] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def begin(self, tenant_id: str, request_id: str) -> RunningRequest:
        """Register a request.

        Raises:
            RequestIdTaken: The tenant already has a running request with that id.
        """
        key = (tenant_id, request_id)
        if key in self._requests:
            raise RequestIdTaken(request_id)
        self._requests[key] = RunningRequest(tenant_id=tenant_id, request_id=request_id)
        self._empty.clear()
        return self._requests[key]

    def end(self, request: RunningRequest) -> None:
        """Remove a request from the register."""
        del self._requests[request.tenant_id, request.request_id]
        if not self._requests:
            self._empty.set()

    async def wait_empty(self) -> None:
        """Wait until no request is running."""
        await self._empty.wait()

    def find(self, tenant_id: str, request_id: str) -> RunningRequest:
        """Return a tenant's request.

        Raises:
            RequestNotFound: The tenant has no running request with that id.
        """
        request = self._requests.get((tenant_id, request_id))
        if request is None:
            raise RequestNotFound(request_id)
        return request

    def all(self) -> list[RunningRequest]:
        """Return all requests, oldest first."""
        return list(self._requests.values())
