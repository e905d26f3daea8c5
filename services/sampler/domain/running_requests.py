"""Requests being served, by tenant and id, so that they can be found and ended."""

import asyncio
from dataclasses import dataclass, field

from services.sampler.domain.errors import RequestIdTaken, RequestNotFound


@dataclass(eq=False, kw_only=True)
class RunningRequest:
    """A call that samples."""

    tenant_id: str
    request_id: str
    is_aborted: bool = False
    """Set once by Abort; prompts that have not begun end without beginning."""
    engine_request_ids: set[str] = field(default_factory=set[str])
    """Its prompts that are in the engine."""
    places: list[asyncio.Future[None]] = field(default_factory=list[asyncio.Future[None]])
    """Its prompts that wait for a place in the engine."""


class RunningRequests:
    """All requests of one sampler."""

    def __init__(self) -> None:
        """Begin empty."""
        self._requests: dict[tuple[str, str], RunningRequest] = {}

    def begin(self, tenant_id: str, request_id: str) -> RunningRequest:
        """Note a request.

        Raises:
            RequestIdTaken: the tenant has one of that id running.
        """
        key = (tenant_id, request_id)
        if key in self._requests:
            raise RequestIdTaken(request_id)
        self._requests[key] = RunningRequest(tenant_id=tenant_id, request_id=request_id)
        return self._requests[key]

    def end(self, request: RunningRequest) -> None:
        """Forget a request."""
        del self._requests[request.tenant_id, request.request_id]

    def find(self, tenant_id: str, request_id: str) -> RunningRequest:
        """Return a tenant's request.

        Raises:
            RequestNotFound: it has none of that id running.
        """
        request = self._requests.get((tenant_id, request_id))
        if request is None:
            raise RequestNotFound(request_id)
        return request

    def all(self) -> list[RunningRequest]:
        """Return every request, oldest first."""
        return list(self._requests.values())
