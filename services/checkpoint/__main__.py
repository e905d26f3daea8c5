"""Starts the checkpoint service: `python -m twinkle_services.checkpoint --config FILE`."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from datetime import timedelta

from twinkle_services.checkpoint.api.endpoints import make_endpoints
from twinkle_services.checkpoint.api.servicer import CheckpointServicer, VersionServicer, WeightStreamServicer
from twinkle_services.checkpoint.application.archives import Archives
from twinkle_services.checkpoint.application.checkpoint_watch import CheckpointWatch
from twinkle_services.checkpoint.application.checkpoints import Checkpoints
from twinkle_services.checkpoint.application.publish import Publisher
from twinkle_services.checkpoint.application.registry import Registry
from twinkle_services.checkpoint.application.uploads import Uploads
from twinkle_services.checkpoint.application.versions import Versions
from twinkle_services.checkpoint.application.weight_feed import WeightFeed
from twinkle_services.checkpoint.backends.archive_uploads import ArchiveUploads
from twinkle_services.checkpoint.backends.disk import open_disk
from twinkle_services.checkpoint.backends.folder_store import FolderStore
from twinkle_services.checkpoint.backends.memory_tier import MemoryTier
from twinkle_services.checkpoint.backends.model_folders import ModelFolders
from twinkle_services.checkpoint.backends.segment_cache import SegmentCache
from twinkle_services.checkpoint.config import CheckpointConfig
from twinkle_services.checkpoint.domain import Catalogue
from twinkle_services.checkpoint.ports import StateStore, UploadStore
from twinkle_services.kit.clock import Clock, SystemClock
from twinkle_services.kit.config import keep_files_private, load_config
from twinkle_services.kit.ids import new_id
from twinkle_services.kit.rpc.auth import InternalAuthenticator
from twinkle_services.kit.rpc.server import RpcServer, serve_until_stopped
from twinkle_services.kit.rpc.service_ports import opened_ports
from twinkle_services.kit.store_threads import StoreThreads
from twinkle_services.kit.telemetry import Readiness, measures, serving_admin, start_telemetry, stop_telemetry
from twinkle_services.kit.telemetry.event_loop import run_service
from twinkle_services.kit.weights import Sender, open_devices, open_segments
from twinkle_services.kit.worker import Threads


def main() -> None:
    """Run the service until it receives SIGINT or SIGTERM."""
    keep_files_private()
    config = load_config(CheckpointConfig)
    start_telemetry(config.telemetry, service=config.service)
    try:
        with serving_admin(config.admin_address(), service=config.service) as readiness:
            run_service(serve(config, readiness))
    finally:
        stop_telemetry()


async def serve(config: CheckpointConfig, readiness: Readiness) -> None:
    """Serve until SIGINT or SIGTERM."""
    clock = SystemClock()
    threads = StoreThreads('store', count=config.thread_count)
    try:
        async with opened_ports(config, readiness) as ports, open_store(config, threads) as store:
            with readiness.step('read the store'):
                registry = await load_registry(config, store, clock)
            uploads = make_upload_store(config, threads, clock)
            server = make_server(config, registry, uploads, threads)
            server.use_ports(ports)
            async with asyncio.TaskGroup() as tasks:
                sweeping = tasks.create_task(sweep(config, registry, uploads))
                with observed(registry, store):
                    await serve_until_stopped(server, config)
                sweeping.cancel()
    finally:
        threads.close()


@contextmanager
def observed(registry: Registry, store: StateStore) -> Iterator[None]:
    """Report the bytes of the states as metrics during the block."""
    with ExitStack() as stack:
        stack.enter_context(measures.store_bytes.observing(registry.catalogue.stored_bytes))
        if isinstance(store, MemoryTier):
            stack.enter_context(measures.shared_memory.observing(lambda: store.used_bytes))
        yield


@asynccontextmanager
async def open_store(config: CheckpointConfig, threads: Threads) -> AsyncIterator[StateStore]:
    """Yield the durable store, or a memory tier over it if shared memory is enabled; spill all versions on exit."""
    disk = open_disk(config.resolved_store_url, config.store_options, are_paths_shown=config.are_folders_shown)
    durable = FolderStore(disk, threads)
    segments = open_segments(config.shared_memory) if config.memory_bytes else None
    if segments is None:
        yield durable
        return
    config.state_dir.mkdir(parents=True, exist_ok=True)
    cache = SegmentCache(segments, store_url=config.resolved_store_url, home=config.state_dir.resolve())
    capacity_bytes = min(config.memory_bytes, shutil.disk_usage(segments.folder).total // 2)
    tier = MemoryTier(durable, cache, threads, capacity_bytes=capacity_bytes)
    spilling = asyncio.create_task(tier.run())
    try:
        yield tier
    finally:
        spilling.cancel()
        await asyncio.wait([spilling])
        await tier.flush()
        cache.close()
        # Segments of killed services are removed now, because the next service may start on this host much later.
        segments.sweep()


async def load_registry(config: CheckpointConfig, store: StateStore, clock: Clock) -> Registry:
    """Return a registry of the states in the store, after deleting the versions in excess of `ring_capacity`."""
    catalogue = Catalogue(ring_capacity=config.ring_capacity, pin_limit=config.pin_limit)
    for version in catalogue.restore(await store.load()):
        await store.delete(version.key)
    return Registry(catalogue, store, clock)


def make_upload_store(config: CheckpointConfig, threads: Threads, clock: Clock) -> UploadStore:
    return ArchiveUploads(
        config.state_dir / 'checkpoint-uploads',
        threads,
        clock=clock,
        time_to_live=timedelta(hours=config.upload_hours),
        limit_bytes=config.state_limit_bytes,
    )


def make_server(config: CheckpointConfig, registry: Registry, uploads: UploadStore, threads: Threads) -> RpcServer:
    """Create the server with its three services. It does not listen yet."""
    limit_bytes = config.state_limit_bytes
    base_models = ModelFolders(config.base_models, threads, max_rank=config.max_lora_rank)
    devices = open_devices(
        config.device_transports, service=config.service, is_encrypted=config.tls.certificate is not None
    )
    weights = WeightStreamServicer(
        Publisher(registry, state_limit_bytes=limit_bytes), WeightFeed(registry, Sender(threads, devices=devices))
    )
    checkpoints = CheckpointServicer(
        Checkpoints(registry),
        Archives(registry),
        Uploads(registry, uploads, base_models, state_limit_bytes=limit_bytes),
        CheckpointWatch(registry, epoch=new_id('ep')),
    )
    server = RpcServer(
        config,
        authenticator=InternalAuthenticator(config.internal_token),
        endpoints=make_endpoints(weights, VersionServicer(Versions(registry)), checkpoints),
    )
    server.on_drain(registry.announcements.close)
    return server


async def sweep(config: CheckpointConfig, registry: Registry, uploads: UploadStore) -> None:
    """Delete expired checkpoints, unused versions and abandoned uploads, periodically."""
    checkpoints, versions = Checkpoints(registry), Versions(registry)
    while True:
        await checkpoints.delete_expired()
        await versions.collect(timedelta(days=config.idle_version_days))
        await uploads.discard_expired()
        await asyncio.sleep(config.sweep_seconds)


if __name__ == '__main__':
    main()
