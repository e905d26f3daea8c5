"""The verb that lists the fleet."""

from services.gateway.fleet.membership import Membership
from services.gateway.fleet.rules import Replica
from services.kit.authority import require_scope
from services.kit.caller import Caller
from services.kit.paging import Page


class ListReplicas:
    """Lists the members by id."""

    def __init__(self, membership: Membership) -> None:
        """List `membership`."""
        self._membership = membership

    async def __call__(self, caller: Caller, page: Page) -> tuple[list[Replica], tuple[str] | None]:
        """Return a page and the sort key of its last item, or None if it is the last page.

        Raises:
            ScopeMissing: the caller is no operator.
        """
        require_scope(caller, 'operator')
        found = sorted(self._membership.fleet.replicas(), key=lambda replica: replica.replica_id)
        if page.after is not None:
            found = [item for item in found if (item.replica_id,) > page.after]
        items = found[: page.size]
        return items, (items[-1].replica_id,) if len(found) > page.size else None
