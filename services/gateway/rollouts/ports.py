"""The store of rollouts."""

from datetime import datetime
from typing import Protocol

from twinkle_services.gateway.catalogue.rules import EntryKey
from twinkle_services.gateway.rollouts.rules import GroupKey, Groups, RolloutFilter, RolloutPage, StoredRollout


class RolloutStore(Protocol):
    """Stores the rollouts of runs by step, group and index."""

    async def save(self, run: EntryKey, step: int, groups: Groups, *, moment: datetime, max_bytes: int) -> int:
        """Store rollouts; a rollout with the step, group and index of a stored one replaces it.

        If the run would have more than `max_bytes` stored bytes, groups are removed in the order of their last change;
        groups of the same call are removed in the order of their ids.

        Args:
            run: tenant and run.
            step: step of all groups.
            groups: new rollouts.
            moment: time of storage.
            max_bytes: limit of stored bytes: the compressed bytes and a constant for each group.

        Returns:
            The number of removed groups.

        Raises:
            RolloutsTooLarge: the changed groups have more than `max_bytes`, or more than `MAX_CHANGED_BYTES` before
                compression; nothing is stored.
            RunDataDamaged: a stored group that would change is damaged; nothing is stored.
        """
        ...

    async def list_page(
        self, run: EntryKey, wanted: RolloutFilter, *, size: int, after: GroupKey | None
    ) -> RolloutPage:
        """Return at most `size` groups that follow `after`, or the first groups; fewer if the groups are large.

        Groups are ordered by step as `wanted` requests, and by id within a step.

        Raises:
            RunDataDamaged: the summaries of one of the groups are damaged.
        """
        ...

    async def get(self, run: EntryKey, group: GroupKey, index: int) -> StoredRollout | None:
        """Return a rollout, or None if it does not exist.

        Raises:
            RunDataDamaged: the group is damaged.
        """
        ...
