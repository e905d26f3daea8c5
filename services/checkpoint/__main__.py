"""Starts the checkpoint service: `python -m services.checkpoint --config FILE`."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

from services.checkpoint.api.endpoints import make_endpoints
from services.checkpoint.application.upload_checkpoint import Intake
from services.checkpoint.application.verbs import Verbs, make_verbs
from services.checkpoint.backends.disk import Disk
from services.checkpoint.backends.folder_store import FolderStore
from services.checkpoint.backends.memory_tier import MemoryTier
from services.checkpoint.backends.model_folders import ModelFolders
from services.checkpoint.backends.segment_shelf import SegmentShelf
from services.checkpoint.backends.upload_files import UploadFiles
from services.checkpoint.config import CheckpointConfig
from services.checkpoint.domain import Catalogue
from services.checkpoint.ports import StateStore, UploadStore
from services.kit.clock import Clock, SystemClock
from services.kit.config import load_config
from services.kit.rpc.auth import InternalAuthenticator
from services.kit.rpc.server import RpcServer, serve_until_stopped
from services.kit.telemetry import start_telemetry, stop_telemetry
from services.kit.weights import Sender, open_segments
from services.kit.worker import Threads


def main() -> None:
    """Run the service until it is told to stop."""
    config = load_config(CheckpointConfig)
    start_telemetry(config.telemetry, service=config.service)
    try:
        asyncio.run(serve(config))
    finally:
        stop_telemetry()


async def serve(config: CheckpointConfig) -> None:
    """Serve until SIGINT or SIGTERM."""
    clock = SystemClock()
    threads = Threads('store', count=config.thread_count)
    try:
        async with open_store(config, threads) as store:
            await serve_from(config, store, threads=threads, clock=clock)
    finally:
        threads.close()


async def serve_from(config: CheckpointConfig, store: StateStore, *, threads: Threads, clock: Clock) -> None:
    """Serve what is in `store` until SIGINT or SIGTERM."""
    intake = make_intake(config, config.state_dir / 'checkpoint-uploads', threads)
    catalogue = await load_catalogue(config, store)
    verbs = make_verbs(catalogue, store, intake, sender=Sender(threads), clock=clock)
    server = make_server(config, verbs)
    async with asyncio.TaskGroup() as tasks:
        sweeping = tasks.create_task(sweep(config, verbs, intake.uploads, clock=clock))
        await serve_until_stopped(server, config)
        sweeping.cancel()


@asynccontextmanager
async def open_store(config: CheckpointConfig, threads: Threads) -> AsyncIterator[StateStore]:
    """Give the durable store, behind shared memory where there is some; in the end nothing waits in memory."""
    durable = FolderStore(Disk(config.resolved_store_url, config.store_options), threads)
    segments = open_segments(config.shared_memory) if config.memory_bytes else None
    if segments is None:
        yield durable
        return
    config.state_dir.mkdir(parents=True, exist_ok=True)
    shelf = SegmentShelf(segments, store_url=config.resolved_store_url, home=config.state_dir.resolve())
    capacity_bytes = min(config.memory_bytes, shutil.disk_usage(segments.folder).total // 2)
    tier = MemoryTier(durable, shelf, threads, capacity_bytes=capacity_bytes)
    spilling = asyncio.create_task(tier.run())
    try:
        yield tier
    finally:
        spilling.cancel()
        await asyncio.wait([spilling])
        await tier.flush()
        shelf.close()
        # Of services that were killed: this one may be the last of its host for long.
        segments.sweep()


def make_intake(config: CheckpointConfig, folder: Path, threads: Threads) -> Intake:
    """Return what takes states in; archives that are not whole lie in `folder`."""
    return Intake(
        uploads=UploadFiles(folder, threads, plain_limit_bytes=config.state_limit_bytes),
        base_models=ModelFolders(config.base_models, threads, max_rank=config.max_lora_rank),
        state_limit_bytes=config.state_limit_bytes,
    )


async def load_catalogue(config: CheckpointConfig, store: StateStore) -> Catalogue:
    """Return a catalogue of what the store has, after clearing away what it must not have."""
    catalogue = Catalogue(ring_capacity=config.ring_capacity, pin_limit=config.pin_limit)
    for version in catalogue.restore(await store.load()):
        await store.delete(version.key)
    return catalogue


def make_server(config: CheckpointConfig, verbs: Verbs) -> RpcServer:
    """Return a server of the contract over `verbs`; nothing listens yet."""
    server = RpcServer(
        config,
        authenticator=InternalAuthenticator(config.internal_token),
        endpoints=make_endpoints(verbs),
    )
    server.on_drain(verbs.announcements.close)
    return server


async def sweep(config: CheckpointConfig, verbs: Verbs, uploads: UploadStore, *, clock: Clock) -> None:
    """Delete what has expired, now and again."""
    while True:
        await verbs.change_checkpoints.delete_expired()
        await verbs.collect_versions(timedelta(days=config.idle_version_days))
        await uploads.discard_older(clock.now() - timedelta(hours=config.upload_hours))
        await asyncio.sleep(config.sweep_seconds)


if __name__ == '__main__':
    main()
