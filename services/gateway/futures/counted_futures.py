"""Futures in SQL, whose ends somebody is told."""

from collections.abc import Callable

from services.gateway.futures.rules import Future
from services.gateway.futures.sql import SqlFutureStore
from services.gateway.store.database import Database


class CountedFutureStore(SqlFutureStore):
    """Keeps futures, and tells what became of each that was to be settled."""

    def __init__(self, database: Database, *, on_settled: Callable[[Future, Future], None]) -> None:
        """Keep them in `database`; `on_settled` gets a future as it was to be settled, and as it is kept."""
        super().__init__(database)
        self._on_settled = on_settled

    async def settle(self, future: Future) -> Future:
        """Keep a finished future, unless it is finished already or has another owner; return what is kept."""
        kept = await super().settle(future)
        self._on_settled(future, kept)
        return kept
