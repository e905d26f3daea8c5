"""Wires rollouts to a database."""

from collections.abc import Iterator
from contextlib import contextmanager

from twinkle_services.gateway.catalogue.runs import Runs
from twinkle_services.gateway.rollouts.rollouts import Rollouts
from twinkle_services.gateway.rollouts.sql import SqlRolloutStore
from twinkle_services.gateway.store.database import Database
from twinkle_services.kit.clock import Clock


@contextmanager
def open_rollouts(database: Database, runs: Runs, *, clock: Clock, max_bytes: int) -> Iterator[Rollouts]:
    """Yield the rollouts of `runs`, with at most `max_bytes` stored bytes each. Stop their threads after the block."""
    store = SqlRolloutStore(database)
    try:
        yield Rollouts(store, runs, clock=clock, max_bytes=max_bytes)
    finally:
        store.close()
