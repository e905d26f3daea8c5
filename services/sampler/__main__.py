"""Starts the sampler service: `python -m services.sampler --config FILE`."""

import asyncio
import importlib
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from services.kit.config import load_config
from services.kit.ids import new_id
from services.kit.rpc.auth import InternalAuthenticator
from services.kit.rpc.channel import open_channel
from services.kit.rpc.server import RpcServer, serve_until_stopped
from services.kit.server_facts import BaseModelFacts, ServerFacts, versioned
from services.kit.telemetry import start_telemetry, stop_telemetry
from services.kit.weights import Segments, open_segments
from services.sampler.api.endpoints import make_endpoints
from services.sampler.application.membership import Membership
from services.sampler.application.verbs import Verbs, make_verbs
from services.sampler.application.versions import Retention
from services.sampler.backends.fleet_client import FleetClient
from services.sampler.backends.fleet_member import FleetMember
from services.sampler.backends.weight_sources import WeightSources
from services.sampler.config import SamplerConfig
from services.sampler.domain.adapter import AdapterKey
from services.sampler.domain.generation import EngineFacts
from services.sampler.ports import SamplerEngine
from twinkle.hub import resolve_model
from twinkle.plugin import keep_plugins_out


def main() -> None:
    """Run the service until it is told to stop."""
    keep_plugins_out()
    config = load_config(SamplerConfig)
    start_telemetry(config.telemetry, service=config.service)
    try:
        asyncio.run(serve(config))
    finally:
        stop_telemetry()


async def serve(config: SamplerConfig) -> None:
    """Serve until SIGINT or SIGTERM, or until the fleet wants this sampler to leave."""
    engine = await asyncio.to_thread(make_engine, config)
    segments = open_segments(config.shared_memory)
    sources = make_sources(config, segments)
    verbs = make_verbs(
        engine,
        sources,
        retention=retention_of(config),
        queue_limit=config.limits.queue_length,
        is_base_prefix_shared=config.share_base_prefixes,
        host_id=segments.host_id if segments else '',
    )
    try:
        server = make_server(config, engine, verbs)
        verbs.versions.start()
        await serve_while_engine_lives(server, engine, config, make_fleet(config, verbs, sources, server))
    finally:
        await verbs.versions.close()
        await engine.close()
        await sources.close()


async def serve_while_engine_lives(
    server: RpcServer, engine: SamplerEngine, config: SamplerConfig, fleet: FleetMember | None = None
) -> None:
    """Serve until told to stop, or until the engine is broken for good.

    Raises:
        SystemExit: the engine broke; whoever supervises this process starts another.
    """
    beside = fleet.serving if fleet else None
    serving = asyncio.create_task(serve_until_stopped(server, config, beside=beside))
    failure = asyncio.create_task(engine.wait_until_failed())
    try:
        await asyncio.wait({serving, failure}, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            raise SystemExit(f'{config.service}: the {engine.facts.engine} engine is broken; start this service again')
        await serving
    finally:
        for task in (serving, failure):
            task.cancel()
        await asyncio.wait({serving, failure})
        await server.stop(timedelta())
        if fleet is not None:
            await fleet.close()


def make_sources(config: SamplerConfig, segments: Segments | None) -> WeightSources:
    """Return where weights come from."""
    return WeightSources(
        config.checkpoint_address,
        internal_token=config.internal_token,
        tls=config.tls,
        segments=segments,
        patience=timedelta(seconds=config.relay_patience_seconds),
    )


def make_fleet(config: SamplerConfig, verbs: Verbs, sources: WeightSources, server: RpcServer) -> FleetMember | None:
    """Return what keeps this sampler in the fleet of its gateways; None where it has none."""
    if not config.gateways:
        return None
    replica_id = new_id('rp')
    channels = {
        address: open_channel(address, internal_token=config.internal_token, tls=config.tls, service='gateway')
        for address in config.gateways
    }
    membership = Membership(
        [FleetClient(address, channel) for address, channel in channels.items()],
        report=lambda is_draining: verbs.report(
            replica_id, config.advertise or server.address, is_draining=is_draining
        ),
        use_checkpoint=sources.use_checkpoint,
        use_relay=sources.use_relay,
        most_interval=timedelta(seconds=config.lease_seconds),
    )
    verbs.versions.on_change(membership.note_change)
    return FleetMember(membership, server, verbs.admission, list(channels.values()))


def retention_of(config: SamplerConfig) -> Retention:
    """Return how much is held and followed."""
    return Retention(
        max_versions=config.max_resident_versions,
        max_bytes=config.max_resident_bytes,
        max_followers=config.max_followed_adapters,
        idle=timedelta(seconds=config.follow_idle_seconds),
        followed_run=AdapterKey(config.follow_tenant, config.follow_run) if config.follow_run else None,
    )


def make_engine(config: SamplerConfig) -> SamplerEngine:
    """Load the model and start the engine; blocks for seconds. Libraries of the other engine are not loaded."""
    folder = str(resolve_model(config.base_model))
    return make_vllm_engine(config, folder) if config.engine == 'vllm' else make_torch_engine(config, folder)


def make_vllm_engine(config: SamplerConfig, folder: str) -> SamplerEngine:
    """Start vLLM with the arguments of the configuration."""
    backend = importlib.import_module('services.sampler.backends.vllm_engine')
    options = backend.VllmEngineOptions(
        base_model=config.base_model,
        folder=folder,
        arguments=config.vllm.engine_args,
        thread_count=config.vllm.thread_count,
        hang_seconds=config.vllm.hang_seconds,
    )
    return backend.VllmEngine(options)


def make_torch_engine(config: SamplerConfig, folder: str) -> SamplerEngine:
    """Load the model into this process."""
    importlib.import_module('torch').set_num_threads(config.torch.thread_count)
    backend = importlib.import_module('services.sampler.backends.torch_engine')
    limits = importlib.import_module('twinkle.sampler.engine').EngineConfig(
        max_sequences=config.torch.max_num_seqs,
        max_batch_tokens=config.torch.max_num_batched_tokens,
        prefill_chunk_tokens=config.torch.prefill_chunk_tokens,
        kv_cache_memory_bytes=config.torch.kv_cache_memory_bytes,
        max_model_len=config.torch.max_model_len,
    )
    options = backend.TorchEngineOptions(
        base_model=config.base_model,
        folder=folder,
        dtype=config.torch.dtype,
        device=config.torch.device,
        patches=config.torch.patches,
        limits=limits,
        mailbox_events=config.torch.mailbox_events,
        stall_seconds=config.torch.stall_seconds,
    )
    return backend.TorchEngine(options)


def make_server(config: SamplerConfig, engine: SamplerEngine, verbs: Verbs) -> RpcServer:
    """Return the server; nothing listens yet."""
    server = RpcServer(
        config,
        authenticator=InternalAuthenticator(config.internal_token),
        endpoints=make_endpoints(verbs),
        facts=lambda: server_facts(
            engine.facts,
            patches=config.torch.patches if config.engine == 'torch' else {},
            is_dedicated=bool(config.follow_run),
        ),
    )
    server.on_drain(verbs.watch_load.close)
    server.on_drain(verbs.relay.close)
    return server


def server_facts(facts: EngineFacts, *, patches: Mapping[str, Mapping[str, Any]], is_dedicated: bool) -> ServerFacts:
    """Return what GetServerInfo tells of the engine, and of what was changed about its model."""
    model = BaseModelFacts(
        base_model=facts.base_model,
        context_tokens=facts.context_tokens,
        vocabulary_size=facts.vocabulary_size,
        parameter_count=facts.parameter_count,
        dtype=facts.dtype,
        is_sampleable=not is_dedicated,
        patches=patches,
    )
    return ServerFacts(
        base_models=[model], components={'engine': [facts.engine]}, engine_version=versioned(facts.engine)
    )


if __name__ == '__main__':
    main()
