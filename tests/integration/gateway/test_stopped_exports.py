"""Tests that a gateway's export runner stops during an export while the database is unreachable."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from twinkle_services.gateway.catalogue.grpc import GrpcCheckpoints
from twinkle_services.gateway.config import ExportsConfig
from twinkle_services.gateway.exports.exports import ExportNotifier
from twinkle_services.gateway.exports.rules import Export, ExportState
from twinkle_services.gateway.exports.runner import ExportRunner, ExportTransfer
from twinkle_services.gateway.exports.sql import SqlExportStore
from twinkle_services.gateway.exports.transfers import CheckpointArchives, ExportTargets, ReportBytes
from twinkle_services.gateway.keys.pepper import PepperedSealer
from twinkle_services.gateway.store.database import Database
from twinkle_services.kit.clock import SystemClock
from twinkle_services.kit.errors import ServiceUnreachable

START = datetime(2026, 1, 1, tzinfo=UTC)
EXPORT = Export(
    export_id='ex-1',
    tenant_id='alice',
    request_id='rq-1',
    checkpoint_path='twinkle://ad-1/weights/best',
    digest='',
    target='hf://org/name',
    is_private=True,
    create_time=START,
    update_time=START,
    due_time=START,
)


class UnreachableStore(SqlExportStore):
    """A store whose database is unreachable when an export is settled."""

    async def settle(self, export: Export) -> bool:
        raise ServiceUnreachable('database')


async def _admit(tenant_id: str) -> None:
    """Admit every tenant."""
    del tenant_id


class SlowArchives(CheckpointArchives):
    """A source of archives whose transfers never finish."""

    def __init__(self, root: Path) -> None:
        super().__init__(GrpcCheckpoints(None, internal_token='', check_storage=_admit), root=root)
        self.started = asyncio.Event()

    @asynccontextmanager
    async def opened(self, path: str, *, digest: str, report: ReportBytes) -> AsyncIterator[Path]:
        del digest, report
        self.started.set()
        await asyncio.Event().wait()
        yield Path(path)


async def test_gateway_stops_while_its_database_is_unreachable(tmp_path: Path) -> None:
    """The export runner stops although it cannot release its running export, so the export remains claimed."""
    database = await Database.open(f'sqlite:///{tmp_path / "gateway.db"}')
    store, archives = UnreachableStore(database), SlowArchives(tmp_path)
    await store.add_if_absent(EXPORT, is_same=lambda _: False, max_unfinished=1)
    transfer = ExportTransfer(archives, ExportTargets(root=None, seconds=60), PepperedSealer(bytes(32)))
    minute = timedelta(minutes=1)
    options = ExportsConfig(at_once=1, attempts=2, lease=minute, poll=minute, keep_for=minute)
    runner = ExportRunner(store, transfer, notifier=ExportNotifier(), options=options, clock=SystemClock())
    task = asyncio.create_task(runner.run_due())
    await archives.started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    stored = await store.get('alice', 'ex-1')
    assert stored is not None
    assert stored.state is ExportState.RUNNING
    await database.close()
