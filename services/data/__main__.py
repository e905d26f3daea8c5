"""Starts the data service: `python -m services.data --config FILE`."""

import asyncio
from datetime import timedelta

from services.data.api.endpoints import make_endpoints
from services.data.application.create_dataset import DatasetLimits
from services.data.application.verbs import Limits, Ports, Verbs, make_verbs
from services.data.backends.disk_datasets import DiskDatasets
from services.data.backends.disk_loaders import DiskLoaders
from services.data.backends.library import LibraryEngine
from services.data.config import DataConfig
from services.kit.clock import SystemClock
from services.kit.config import load_config
from services.kit.rpc.auth import InternalAuthenticator
from services.kit.rpc.server import RpcServer, serve_until_stopped
from services.kit.server_facts import ServerFacts
from services.kit.telemetry import start_telemetry, stop_telemetry
from services.kit.uploads import UploadRules, UploadStore
from services.kit.worker import Threads
from twinkle.plugin import keep_plugins_out
from twinkle.preprocessor import filter_names, preprocessor_names
from twinkle.template import template_names


def main() -> None:
    """Run the service until it is told to stop."""
    keep_plugins_out()
    config = load_config(DataConfig)
    start_telemetry(config.telemetry, service=config.service)
    try:
        asyncio.run(serve(config))
    finally:
        stop_telemetry()


async def serve(config: DataConfig) -> None:
    """Serve until SIGINT or SIGTERM."""
    threads = Threads('rows', count=config.thread_count)
    ports = make_ports(config, threads)
    server = make_server(config, make_verbs(ports, make_limits(config)))
    try:
        async with asyncio.TaskGroup() as tasks:
            sweeping = tasks.create_task(sweep(config, ports.uploads))
            await serve_until_stopped(server, config)
            sweeping.cancel()
    finally:
        threads.close()


def make_ports(config: DataConfig, threads: Threads) -> Ports:
    """Return the disk and the library."""
    root = config.state_dir.resolve() / 'data'
    clock = SystemClock()
    rules = UploadRules(time_to_live=timedelta(hours=config.upload_hours))
    return Ports(
        store=DiskDatasets(root / 'datasets', threads),
        loaders=DiskLoaders(root / 'loaders', threads),
        uploads=UploadStore(root / 'uploads', clock=clock, rules=rules),
        engine=LibraryEngine(
            threads,
            base_models=config.base_models,
            local_roots=config.local_roots,
            template_cache=config.template_cache,
        ),
        clock=clock,
    )


def make_limits(config: DataConfig) -> Limits:
    """Return what one tenant may have."""
    return Limits(
        datasets=DatasetLimits(rows=config.row_limit, datasets=config.dataset_limit),
        upload_bytes=config.upload_limit_bytes,
        loaders=config.loader_limit,
        queue_length=config.limits.queue_length,
    )


def make_server(config: DataConfig, verbs: Verbs) -> RpcServer:
    """Return a server of the contract over `verbs`."""
    return RpcServer(
        config,
        authenticator=InternalAuthenticator(config.internal_token),
        endpoints=make_endpoints(verbs),
        facts=facts,
    )


def facts() -> ServerFacts:
    """Return what can be chosen by name here."""
    preprocessors = [*preprocessor_names(), *filter_names()]
    return ServerFacts(components={'preprocessor': preprocessors, 'template': template_names()})


async def sweep(config: DataConfig, uploads: UploadStore) -> None:
    """Delete expired uploads periodically."""
    while True:
        await uploads.discard_expired()
        await asyncio.sleep(config.sweep_seconds)


if __name__ == '__main__':
    main()
