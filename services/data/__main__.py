"""Starts the data service: `python -m twinkle_services.data --config FILE`."""

import asyncio
from datetime import timedelta

from twinkle.plugin import keep_plugins_out
from twinkle.preprocessor import filter_names, preprocessor_names
from twinkle.template import template_names
from twinkle_services.data.api.servicer import DatasetServicer, LoaderServicer, make_endpoints
from twinkle_services.data.application.datasets import DatasetLimits, Datasets
from twinkle_services.data.application.live_streams import LiveStreams
from twinkle_services.data.application.loaders import Loaders
from twinkle_services.data.application.uploads import Uploads
from twinkle_services.data.backends.disk_datasets import DiskDatasets
from twinkle_services.data.backends.disk_loaders import DiskLoaders
from twinkle_services.data.backends.hub_rows import HubAccess
from twinkle_services.data.backends.library import LibraryEngine
from twinkle_services.data.config import DataConfig
from twinkle_services.data.domain import DecodedBytes, DecodedLimits
from twinkle_services.kit.clock import SystemClock
from twinkle_services.kit.config import keep_files_private, load_config
from twinkle_services.kit.resumable_uploads import UploadQuota, UploadRules, UploadStore
from twinkle_services.kit.rpc.auth import InternalAuthenticator
from twinkle_services.kit.rpc.server import RpcServer, serve_until_stopped
from twinkle_services.kit.rpc.service_ports import opened_ports
from twinkle_services.kit.server_facts import ServerFacts
from twinkle_services.kit.store_threads import StoreThreads
from twinkle_services.kit.telemetry import Readiness, serving_admin, start_telemetry, stop_telemetry
from twinkle_services.kit.telemetry.event_loop import run_service
from twinkle_services.kit.worker import Threads


def main() -> None:
    """Run the service until it receives SIGINT or SIGTERM."""
    keep_plugins_out()
    keep_files_private()
    config = load_config(DataConfig)
    start_telemetry(config.telemetry, service=config.service)
    try:
        with serving_admin(config.admin_address(), service=config.service) as readiness:
            run_service(serve(config, readiness))
    finally:
        stop_telemetry()


async def serve(config: DataConfig, readiness: Readiness) -> None:
    """Serve until SIGINT or SIGTERM."""
    threads = StoreThreads('rows', count=config.thread_count)
    try:
        async with opened_ports(config, readiness) as ports, asyncio.TaskGroup() as tasks:
            uploads = make_upload_store(config)
            server = make_server(config, uploads, threads)
            server.use_ports(ports)
            sweeping = tasks.create_task(sweep(config, uploads))
            await serve_until_stopped(server, config)
            sweeping.cancel()
    finally:
        threads.close()


def make_upload_store(config: DataConfig) -> UploadStore:
    rules = UploadRules(
        time_to_live=timedelta(hours=config.upload_hours),
        byte_quota=UploadQuota('dataset_upload_bytes', config.upload_bytes),
    )
    return UploadStore(config.state_dir.resolve() / 'data' / 'uploads', clock=SystemClock(), rules=rules)


def make_limits(config: DataConfig) -> DatasetLimits:
    decoded = DecodedLimits(
        rows=config.row_limit,
        dataset_bytes=config.dataset_bytes,
        tenant_bytes=config.decoded_bytes_per_tenant,
        total_bytes=config.decoded_bytes,
    )
    return DatasetLimits(
        decoded=decoded,
        stored_bytes=config.stored_bytes,
        datasets=config.dataset_limit,
        queue_length=config.limits.queue_length,
    )


def make_server(config: DataConfig, uploads: UploadStore, threads: Threads) -> RpcServer:
    """Create the server with its services. It does not listen yet."""
    root, limits = config.state_dir.resolve() / 'data', make_limits(config)
    store, loaders = DiskDatasets(root / 'datasets', threads), DiskLoaders(root / 'loaders', threads)
    engine = LibraryEngine(
        threads,
        base_models=config.base_models,
        access=HubAccess(
            tuple(folder.resolve() for folder in config.local_roots), frozenset(config.hub_token_repositories)
        ),
        template_cache=config.template_cache,
        download_limit_bytes=config.stored_bytes,
        decoded=DecodedBytes(limits.decoded),
    )
    streams = LiveStreams(engine, limit=config.stream_limit, tenant_limit=max(1, config.stream_limit // 2))
    datasets = DatasetServicer(
        Datasets(store, loaders, uploads, engine, clock=SystemClock(), limits=limits),
        Uploads(uploads, limit_bytes=config.upload_limit_bytes),
    )
    batches = LoaderServicer(Loaders(store, loaders, engine, streams, limit=config.loader_limit))
    server = RpcServer(
        config,
        authenticator=InternalAuthenticator(config.internal_token),
        endpoints=make_endpoints(datasets, batches),
        facts=facts,
    )
    server.on_drain(streams.close_all)
    return server


def facts() -> ServerFacts:
    """Return the names of the available components."""
    preprocessors = [*preprocessor_names(), *filter_names()]
    return ServerFacts(components={'preprocessor': preprocessors, 'template': template_names()})


async def sweep(config: DataConfig, uploads: UploadStore) -> None:
    """Delete expired uploads periodically."""
    while True:
        await uploads.discard_expired()
        await asyncio.sleep(config.sweep_seconds)


if __name__ == '__main__':
    main()
