"""The two copies that are kept of what model services tell of their adapters: the catalogue's runs, and meters."""

from collections.abc import Collection
from datetime import datetime

from services.gateway.domain.catalogue import EntryKey, Run
from services.gateway.domain.usage import MeteredRun, Reading
from services.gateway.ports import Shelf


class MeteredRuns:
    """Keeps both, so that one stream from each model service is enough.

    Meters come first: they are in memory and always taken, and one that comes again, since its run could not be kept
    then, counts for nothing.
    """

    def __init__(self, *, runs: Shelf[Run], meters: Shelf[Reading]) -> None:
        """Copy to these."""
        self._runs = runs
        self._meters = meters

    async def save(self, entry: MeteredRun) -> None:
        """Keep both as they are now."""
        await self._meters.save(entry.reading)
        await self._runs.save(entry.run)

    async def mark_gone(self, key: EntryKey, *, moment: datetime) -> None:
        """Mark one run as gone in both; an unknown one is no error."""
        await self._meters.mark_gone(key, moment=moment)
        await self._runs.mark_gone(key, moment=moment)

    async def mark_absent_gone(self, present: Collection[EntryKey], *, moment: datetime) -> None:
        """Mark every run as gone in both whose key is not in `present`."""
        await self._meters.mark_absent_gone(present, moment=moment)
        await self._runs.mark_absent_gone(present, moment=moment)
