"""The verb for calls that one replica answers as well as another, such as LoadAdapter."""

from services.gateway.sampling.dispatch import Dispatch
from services.gateway.sampling.failover import Attempt
from services.gateway.sampling.ports import Samplers
from services.gateway.sampling.rules import RoutedOrder
from services.kit.authority import require_scope
from services.kit.caller import Caller
from services.kit.errors import DomainError


class RoutedCall:
    """Calls the replica that is right, and another one where it fails."""

    def __init__(self, dispatch: Dispatch, samplers: Samplers) -> None:
        """Call `samplers` as `dispatch` finds them."""
        self._dispatch = dispatch
        self._samplers = samplers

    async def __call__(self, caller: Caller, order: RoutedOrder, *, deadline: float | None = None) -> bytes:
        """Return the answer.

        Raises:
            ScopeMissing: the caller may not sample.
            NoReplica: nobody is there.
            DomainError: as the sampler says.
        """
        require_scope(caller, 'sample')
        attempt = Attempt(key=order.key, deadline=deadline)
        while True:
            replica = await self._dispatch.find(attempt)
            try:
                with self._dispatch.membership.working(replica, 0):
                    return await self._samplers.call(replica.address, order.method, order.request, deadline=deadline)
            except DomainError as error:
                self._dispatch.failed(attempt, replica, error)
