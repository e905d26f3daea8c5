"""Starts the sampler service: `python -m services.sampler --config FILE`."""

import asyncio
from collections.abc import Mapping
from typing import Any

import torch

from services.kit.config import load_config
from services.kit.rpc.auth import InternalAuthenticator
from services.kit.rpc.channel import open_channel
from services.kit.rpc.server import RpcServer, serve_until_stopped
from services.kit.server_facts import BaseModelFacts, ServerFacts
from services.kit.telemetry import start_telemetry, stop_telemetry
from services.sampler.api.endpoints import make_endpoints
from services.sampler.application.verbs import Verbs, make_verbs
from services.sampler.backends.checkpoint_client import CheckpointClient
from services.sampler.backends.torch_engine import TorchEngine, TorchEngineOptions
from services.sampler.config import SamplerConfig, TorchEngineConfig
from services.sampler.domain.generation import EngineFacts
from services.sampler.ports import SamplerEngine
from twinkle.hub import resolve_model
from twinkle.sampler.engine import EngineConfig


def main() -> None:
    """Run the service until it is told to stop."""
    config = load_config(SamplerConfig)
    start_telemetry(config.telemetry, service=config.service)
    try:
        asyncio.run(serve(config))
    finally:
        stop_telemetry()


async def serve(config: SamplerConfig) -> None:
    """Serve until SIGINT or SIGTERM."""
    torch.set_num_threads(config.torch.thread_count)
    engine = await asyncio.to_thread(make_engine, config)
    channel = open_channel(config.checkpoint_address, internal_token=config.internal_token)
    verbs = make_verbs(
        engine,
        CheckpointClient(channel),
        max_resident_versions=config.max_resident_versions,
        queue_limit=config.limits.queue_length,
    )
    try:
        await serve_until_stopped(make_server(config, engine, verbs), config)
    finally:
        await verbs.versions.close()
        await engine.close()
        await channel.close()


def make_engine(config: SamplerConfig) -> TorchEngine:
    """Load the model and start its engine; blocks for seconds."""
    options = TorchEngineOptions(
        base_model=config.base_model,
        folder=str(resolve_model(config.base_model)),
        dtype=config.torch.dtype,
        device=config.torch.device,
        patches=config.torch.patches,
        limits=engine_limits(config.torch),
        mailbox_events=config.torch.mailbox_events,
        stall_seconds=config.torch.stall_seconds,
    )
    return TorchEngine(options)


def make_server(config: SamplerConfig, engine: SamplerEngine, verbs: Verbs) -> RpcServer:
    """Return the server; nothing listens yet."""
    server = RpcServer(
        config,
        authenticator=InternalAuthenticator(config.internal_token),
        endpoints=make_endpoints(verbs),
        facts=lambda: server_facts(engine.facts, patches=config.torch.patches),
    )
    server.on_drain(verbs.watch_load.close)
    return server


def engine_limits(config: TorchEngineConfig) -> EngineConfig:
    """Return the library's limits for what the configuration says."""
    return EngineConfig(
        max_sequences=config.max_num_seqs,
        max_batch_tokens=config.max_num_batched_tokens,
        prefill_chunk_tokens=config.prefill_chunk_tokens,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
        max_model_len=config.max_model_len,
    )


def server_facts(facts: EngineFacts, *, patches: Mapping[str, Mapping[str, Any]]) -> ServerFacts:
    """Return what GetServerInfo tells of the engine, and of what was changed about its model."""
    model = BaseModelFacts(
        base_model=facts.base_model,
        context_tokens=facts.context_tokens,
        vocabulary_size=facts.vocabulary_size,
        parameter_count=facts.parameter_count,
        dtype=facts.dtype,
        is_sampleable=True,
        patches=patches,
    )
    return ServerFacts(base_models=[model], components={'engine': ['torch']})


if __name__ == '__main__':
    main()
