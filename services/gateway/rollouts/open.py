"""Wires rollouts to a database."""

from collections.abc import Iterator
from contextlib import contextmanager

from services.gateway.catalogue.runs import Runs
from services.gateway.rollouts.rollouts import Rollouts
from services.gateway.rollouts.sql import SqlRolloutStore
from services.gateway.store.database import Database
from services.kit.clock import Clock


@contextmanager
def open_rollouts(database: Database, runs: Runs, *, clock: Clock, max_bytes: int) -> Iterator[Rollouts]:
    """Yield the rollouts of `runs`, with at most `max_bytes` stored bytes each. Stop their threads after the block."""
    store = SqlRolloutStore(database)
    try:
        yield Rollouts(store, runs, clock=clock, max_bytes=max_bytes)
    finally:
        store.close()
