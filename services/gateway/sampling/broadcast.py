"""The verb for calls that go to every replica, such as Pause."""

import asyncio
from collections.abc import Sequence

from services.gateway.fleet.routing import RouteKey
from services.gateway.fleet.rules import Replica, ReplicaState
from services.gateway.sampling.dispatch import Dispatch
from services.gateway.sampling.ports import Samplers
from services.kit.authority import require_scope
from services.kit.caller import Caller
from services.kit.errors import DomainError, NotFound, ServiceUnreachable
from services.kit.errors.base import Code


class Broadcast:
    """Calls all replicas at the same time."""

    def __init__(self, dispatch: Dispatch, samplers: Samplers) -> None:
        """Call all whom `dispatch` knows."""
        self._dispatch = dispatch
        self._samplers = samplers

    async def __call__(
        self, caller: Caller, method: str, request: bytes, *, scope: str, deadline: float | None = None
    ) -> list[bytes]:
        """Return the answers of those that have what the call is about: at least one.

        Raises:
            ScopeMissing: the caller may not.
            NoReplica: nobody is there.
            DomainError: what a replica refused it with, though others may have obeyed.
        """
        require_scope(caller, scope)
        results = await asyncio.gather(
            *(self._call(replica, method, request, deadline=deadline) for replica in self.members()),
            return_exceptions=True,
        )
        return answers_among(results)

    def members(self) -> list[Replica]:
        """Return whom a call to all goes to; those of the configuration that are out of reach only if all are.

        Raises:
            NoReplica: nobody is there.
        """
        serving = self._dispatch.membership.fleet.serving('sampler')
        members = [replica for replica in serving if replica.state is not ReplicaState.LOST] or serving
        if not members:
            raise self._dispatch.missing(RouteKey(base_model=''))
        return members

    async def _call(self, replica: Replica, method: str, request: bytes, *, deadline: float | None) -> bytes:
        with self._dispatch.membership.working(replica, 0):
            return await self._samplers.call(replica.address, method, request, deadline=deadline)


def answers_among(results: Sequence[bytes | BaseException]) -> list[bytes]:
    """Return the answers of those that have what was asked for.

    Raises:
        DomainError: one that is about the request, before one that is about a connection; NotFound only if all say so.
    """
    answers = [result for result in results if isinstance(result, bytes)]
    errors = [result for result in results if isinstance(result, BaseException)]
    grave = [error for error in errors if not _is_not_found(error)]
    for error in sorted(grave, key=lambda error: isinstance(error, ServiceUnreachable)):
        raise error
    if not answers:
        raise errors[0]
    return answers


def _is_not_found(error: BaseException) -> bool:
    return isinstance(error, NotFound) or (isinstance(error, DomainError) and error.code is Code.NOT_FOUND)
