"""The verb that asks a replica to leave."""

from services.gateway.fleet.membership import Membership
from services.gateway.fleet.rules import Replica
from services.kit.authority import require_scope
from services.kit.caller import Caller


class Drain:
    """Gives a replica no more work; it hears of it with its next lease. Idempotency: again is no error."""

    def __init__(self, membership: Membership) -> None:
        """Drain members of `membership`."""
        self._membership = membership

    async def __call__(self, caller: Caller, replica_id: str) -> Replica:
        """Return the replica.

        Raises:
            ScopeMissing: the caller is no operator.
            ReplicaNotFound: there is none of that id, or it is lost.
        """
        require_scope(caller, 'operator')
        return self._membership.drain(replica_id)
