"""Starts the model service: `python -m services.model --config FILE`."""

import asyncio
from contextlib import AsyncExitStack
from datetime import timedelta

from services.kit.clock import SystemClock
from services.kit.config import load_config
from services.kit.rpc.auth import InternalAuthenticator
from services.kit.rpc.channel import open_channel
from services.kit.rpc.server import RpcServer, serve_until_stopped
from services.kit.telemetry import start_telemetry, stop_telemetry
from services.model.api.endpoints import make_endpoints
from services.model.application.verbs import Limits, make_verbs
from services.model.backends.checkpoint_client import CheckpointClient
from services.model.backends.local import LocalBackend
from services.model.backends.upload_files import UploadFiles, UploadLimits
from services.model.config import ModelConfig
from services.model.ports import TrainerBackend, WeightStore


def main() -> None:
    """Run the service until it is told to stop."""
    config = load_config(ModelConfig)
    start_telemetry(config.telemetry, service=config.service)
    try:
        asyncio.run(serve(config))
    finally:
        stop_telemetry()


async def serve(config: ModelConfig) -> None:
    """Serve until SIGINT or SIGTERM."""
    async with AsyncExitStack() as stack:
        backend = await load_backend(config)
        stack.push_async_callback(backend.close)
        channel = await stack.enter_async_context(
            open_channel(config.checkpoint_address, internal_token=config.internal_token)
        )
        await serve_until_stopped(make_server(config, backend, CheckpointClient(channel)), config)


async def load_backend(config: ModelConfig) -> LocalBackend:
    """Load the engine that the configuration describes; takes seconds."""
    return await LocalBackend.load(
        config.base_model,
        dtype=config.dtype,
        device=config.device,
        thread_count=config.thread_count,
        max_batch_tokens=config.max_batch_tokens,
        max_lora_rank=config.max_lora_rank,
    )


def make_server(config: ModelConfig, backend: TrainerBackend, store: WeightStore) -> RpcServer:
    """Return a server of the contract over an engine and a store; nothing listens yet."""
    limits = Limits(
        adapters=config.max_adapters,
        lora_rank=config.max_lora_rank,
        queue_length=config.limits.queue_length,
        gap_seconds=config.gap_seconds,
    )
    clock = SystemClock()
    uploads = UploadFiles(
        config.state_dir.resolve() / 'batch-uploads',
        clock=clock,
        limits=UploadLimits(tenant_bytes=config.upload_bytes, time_to_live=timedelta(seconds=config.upload_seconds)),
    )
    verbs = make_verbs(backend, store, uploads, clock=clock, limits=limits)
    server = RpcServer(
        config,
        authenticator=InternalAuthenticator(config.internal_token),
        endpoints=make_endpoints(verbs),
        facts=backend.facts,
    )
    server.on_drain(verbs.directory.close)
    return server


if __name__ == '__main__':
    main()
