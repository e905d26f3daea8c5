"""Which of the caller's adapters are held somewhere in the fleet."""

import asyncio
from dataclasses import replace

from services.gateway.fleet.rules import ResidentAdapter
from services.gateway.sampling.broadcast import Broadcast
from services.gateway.sampling.ports import Samplers
from services.kit.authority import require_scope
from services.kit.caller import Caller
from services.kit.paging import Page

SortKey = tuple[str, int]


class ListResidentAdapters:
    """Lists versions by adapter and version; one that several replicas hold is listed once."""

    def __init__(self, samplers: Samplers, broadcast: Broadcast) -> None:
        """Ask all replicas."""
        self._samplers = samplers
        self._broadcast = broadcast

    async def __call__(
        self, caller: Caller, page: Page, *, deadline: float | None = None
    ) -> tuple[list[ResidentAdapter], SortKey | None]:
        """Return a page and the sort key of its last item, or None if it is the last page.

        Raises:
            ScopeMissing: the caller may not sample.
            NoReplica: nobody is there.
            DomainError: a replica does not answer.
        """
        require_scope(caller, 'sample')
        addresses = [replica.address for replica in self._broadcast.members()]
        lists = await asyncio.gather(
            *(self._samplers.resident_adapters(address, deadline=deadline) for address in addresses)
        )
        held: dict[SortKey, ResidentAdapter] = {}
        for item in (item for items in lists for item in items):
            key = (item.adapter_id, item.version)
            count = item.sequence_count + (held[key].sequence_count if key in held else 0)
            held[key] = replace(item, sequence_count=count)
        found = [held[key] for key in sorted(held) if page.after is None or key > page.after]
        items = found[: page.size]
        after = (items[-1].adapter_id, items[-1].version) if len(found) > page.size else None
        return items, after
