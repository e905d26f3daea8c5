"""How busy the fleet of samplers is."""

import asyncio
from collections.abc import Sequence

from services.gateway.fleet.rules import ReplicaLoad
from services.gateway.sampling.broadcast import Broadcast
from services.gateway.sampling.ports import Samplers
from services.kit.authority import require_scope
from services.kit.caller import Caller
from services.kit.errors import DomainError

ANSWER_SECONDS = 2.0
"""How long a replica may take before its part is left out."""


class GetLoad:
    """Adds up the replicas' loads."""

    def __init__(self, samplers: Samplers, broadcast: Broadcast) -> None:
        """Ask all replicas."""
        self._samplers = samplers
        self._broadcast = broadcast

    async def __call__(self, caller: Caller) -> ReplicaLoad:
        """Return the load now, of those that answer.

        Raises:
            ScopeMissing: the caller may not sample.
            NoReplica: nobody is there.
            DomainError: nobody answers.
        """
        require_scope(caller, 'sample')
        deadline = asyncio.get_running_loop().time() + ANSWER_SECONDS
        results = await asyncio.gather(
            *(self._samplers.load(replica.address, deadline=deadline) for replica in self._broadcast.members()),
            return_exceptions=True,
        )
        loads = [result for result in results if isinstance(result, ReplicaLoad)]
        for error in results:
            if isinstance(error, BaseException) and (not loads or not isinstance(error, DomainError)):
                raise error
        return total_of(loads)


def total_of(loads: Sequence[ReplicaLoad]) -> ReplicaLoad:
    """Return the load of several replicas as if they were one: shares are weighted by what they are shares of."""
    capacity = sum(load.max_sequence_count for load in loads)
    speed = sum(load.tokens_per_second for load in loads)
    return ReplicaLoad(
        running_sequence_count=sum(load.running_sequence_count for load in loads),
        waiting_sequence_count=sum(load.waiting_sequence_count for load in loads),
        kv_usage=sum(load.kv_usage * load.max_sequence_count for load in loads) / capacity if capacity else 0.0,
        tokens_per_second=speed,
        prefix_hit_rate=sum(load.prefix_hit_rate * load.tokens_per_second for load in loads) / speed if speed else 0.0,
        is_paused=all(load.is_paused for load in loads),
        max_sequence_count=capacity,
        is_sleeping=all(load.is_sleeping for load in loads),
    )
