"""The end of a gateway in the middle of an export, while its database does not answer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from services.gateway.exports.export_news import ExportNews
from services.gateway.exports.export_world import ExportWorld
from services.gateway.exports.rules import Export, ExportState
from services.gateway.exports.run_exports import ExportLimits, RunExports
from services.gateway.exports.sealer import PepperedSealer
from services.gateway.exports.sql import SqlExportStore
from services.gateway.store.database import Database
from services.kit.clock import SystemClock
from services.kit.errors import ServiceUnreachable
from services.kit.rpc.context import acting_for

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
EXPORT = Export(
    export_id='ex-1',
    tenant_id='alice',
    request_id='rq-1',
    checkpoint_path='twinkle://ad-1/weights/best',
    digest='',
    target='hf://org/name',
    is_private=True,
    create_time=BEGIN,
    update_time=BEGIN,
    due_time=BEGIN,
)


class AwayStore(SqlExportStore):
    """Cannot be told how an export went."""

    async def settle(self, export: Export) -> bool:
        """Raise."""
        raise ServiceUnreachable('database')


class SlowArchives:
    """Fetches for ever."""

    def __init__(self) -> None:
        """Wait to be asked."""
        self.asked = asyncio.Event()

    async def clear(self) -> None:
        """Hold nothing."""

    @asynccontextmanager
    async def opened(self, path: str, **options: Any) -> AsyncIterator[Path]:
        """Begin."""
        self.asked.set()
        await asyncio.Event().wait()
        yield Path(path)


async def test_a_gateway_stops_while_its_database_is_away(tmp_path: Path) -> None:
    """What it cannot give back stays claimed, and is due again when its lease ends."""
    database = await Database.open(f'sqlite:///{tmp_path / "gateway.db"}')
    store, archives = AwayStore(database), SlowArchives()
    await store.add_if_absent(EXPORT, is_same=lambda _: False, most_unfinished=1)
    world = ExportWorld(
        store=store,
        archives=archives,
        destination=None,  # pyright: ignore[reportArgumentType] (nothing gets as far)
        sealer=PepperedSealer(bytes(32)),
        news=ExportNews(),
        acting_for=acting_for,
        clock=SystemClock(),
    )
    minute = timedelta(minutes=1)
    limits = ExportLimits(at_once=1, attempts=2, lease=minute, poll=minute, keep_for=minute)
    work = asyncio.create_task(RunExports(world, limits).run_due())
    await archives.asked.wait()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    kept = await store.get('alice', 'ex-1')
    assert kept is not None
    assert kept.state is ExportState.RUNNING
    await database.close()
