"""The verb that ends a sampling request of the caller's."""

import asyncio

from services.gateway.errors import NoReplica, SamplingNotFound
from services.gateway.sampling.broadcast import Broadcast
from services.gateway.sampling.ports import Samplers
from services.gateway.sampling.running_samples import RunningSample, RunningSamples
from services.kit.authority import require_scope
from services.kit.caller import Caller

_FIRST_PAUSE_SECONDS = 0.01
_LONGEST_PAUSE_SECONDS = 0.5


class AbortSample:
    """Ends a request wherever its parts run; its sequences end with the reason 'abort'."""

    def __init__(self, samplers: Samplers, requests: RunningSamples, broadcast: Broadcast) -> None:
        """Look among `requests`, then ask all replicas: another gateway may have sent it."""
        self._samplers = samplers
        self._requests = requests
        self._broadcast = broadcast

    async def __call__(self, caller: Caller, request_id: str, request: bytes) -> None:
        """End it.

        Args:
            caller: whose it is.
            request_id: its id.
            request: the message that names it.

        Raises:
            SamplingNotFound: the caller has none of that id running.
        """
        require_scope(caller, 'sample')
        running = self._requests.find(caller.tenant_id, request_id)
        if running is None:
            try:
                await self._broadcast(caller, 'Abort', request, scope='sample')
            except NoReplica as error:
                raise SamplingNotFound(request_id) from error
            return
        running.aborted.set()
        await asyncio.gather(*(self._end(running, part, address) for part, address in list(running.parts.items())))

    async def _end(self, running: RunningSample, part: str, address: str) -> None:
        """End a part; one that is still on its way is not known to its replica yet, and ended once it is."""
        pause = _FIRST_PAUSE_SECONDS
        while running.parts.get(part) == address and not await self._samplers.abort(address, part):
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
