"""Starts the checkpoint service: `python -m services.checkpoint --config FILE`."""

import asyncio
from datetime import timedelta

from services.checkpoint.api.endpoints import make_endpoints
from services.checkpoint.application.verbs import Verbs, make_verbs
from services.checkpoint.backends.disk import Disk
from services.checkpoint.backends.folder_store import FolderStore
from services.checkpoint.backends.upload_files import UploadFiles
from services.checkpoint.config import CheckpointConfig
from services.checkpoint.domain import Catalogue
from services.checkpoint.ports import StateStore, UploadStore
from services.kit.clock import Clock, SystemClock
from services.kit.config import load_config
from services.kit.rpc.auth import InternalAuthenticator
from services.kit.rpc.server import RpcServer, serve_until_stopped
from services.kit.telemetry import start_telemetry, stop_telemetry
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
    store = FolderStore(Disk(config.resolved_store_url), threads)
    uploads = UploadFiles(config.state_dir / 'checkpoint-uploads', threads)
    catalogue = await load_catalogue(config, store)
    verbs = make_verbs(catalogue, store, uploads, clock=clock, state_limit_bytes=config.state_limit_bytes)
    server = make_server(config, verbs)
    try:
        async with asyncio.TaskGroup() as tasks:
            sweeping = tasks.create_task(sweep(config, verbs, uploads, clock=clock))
            await serve_until_stopped(server, config)
            sweeping.cancel()
    finally:
        threads.close()


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
        await uploads.discard_older(clock.now() - timedelta(hours=config.upload_hours))
        await asyncio.sleep(config.sweep_seconds)


if __name__ == '__main__':
    main()
