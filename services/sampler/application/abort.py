"""End a request of the caller's."""

from services.kit.caller import Caller
from services.sampler.application.admission import Admission
from services.sampler.domain.running_requests import RunningRequest, RunningRequests
from services.sampler.ports import SamplerEngine


class Abort:
    """Ends running requests; their sequences end with `StopReason.ABORT`, and their calls end well."""

    def __init__(self, engine: SamplerEngine, admission: Admission, requests: RunningRequests) -> None:
        """Act on the requests that the sampling verbs register."""
        self._engine = engine
        self._admission = admission
        self._requests = requests

    async def __call__(self, caller: Caller, request_id: str) -> None:
        """End one request.

        Raises:
            RequestNotFound: the caller has none of that id running.
        """
        await self._end(self._requests.find(caller.tenant_id, request_id))

    async def all(self) -> None:
        """End every request of every tenant."""
        for request in self._requests.all():
            await self._end(request)

    async def _end(self, request: RunningRequest) -> None:
        request.is_aborted = True
        self._admission.hasten(request)
        for engine_request_id in list(request.engine_request_ids):
            await self._engine.abort(engine_request_id)
