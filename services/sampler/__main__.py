"""Starts the sampler service: `python -m twinkle_services.sampler --config FILE`."""

import asyncio
import importlib
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

from twinkle.hub import HubError, resolve_model, weight_bytes
from twinkle.infra.garbage import collections_paused
from twinkle.plugin import keep_plugins_out
from twinkle_services.kit.config import keep_files_private, load_config
from twinkle_services.kit.ids import new_id
from twinkle_services.kit.rpc.auth import InternalAuthenticator
from twinkle_services.kit.rpc.channel import open_channel
from twinkle_services.kit.rpc.server import RpcServer, serve_until_stopped
from twinkle_services.kit.rpc.service_ports import ServicePorts, opened_ports
from twinkle_services.kit.server_facts import BaseModelFacts, ServerFacts, versioned
from twinkle_services.kit.telemetry import Readiness, measures, serving_admin, start_telemetry, stop_telemetry
from twinkle_services.kit.telemetry.event_loop import run_service
from twinkle_services.kit.weights import Devices, Segments, Sender, open_devices, open_segments
from twinkle_services.kit.worker import Threads
from twinkle_services.sampler.api.endpoints import make_endpoints
from twinkle_services.sampler.application.adapter_versions import AdapterVersions
from twinkle_services.sampler.application.admission import Admission
from twinkle_services.sampler.application.engine_control import EngineControl
from twinkle_services.sampler.application.full_parameter_run import FullParameterRun
from twinkle_services.sampler.application.membership import Membership
from twinkle_services.sampler.application.prompt_runner import PromptRunner
from twinkle_services.sampler.application.relay import Relay
from twinkle_services.sampler.application.replica import Replica
from twinkle_services.sampler.application.resident_adapters import ResidentAdapters
from twinkle_services.sampler.application.sampling import Sampling
from twinkle_services.sampler.application.versions_protocol import Retention, Versions
from twinkle_services.sampler.backends.fleet_client import FleetClient
from twinkle_services.sampler.backends.fleet_member import FleetMember
from twinkle_services.sampler.backends.weight_sources import WeightSources
from twinkle_services.sampler.config import SamplerConfig
from twinkle_services.sampler.domain.adapter import AdapterKey
from twinkle_services.sampler.domain.generation import EngineFacts
from twinkle_services.sampler.ports import SamplerEngine, WeightSource


def main() -> None:
    """Run the service until it is stopped; see `serve`."""
    keep_plugins_out()
    keep_files_private()
    config = load_config(SamplerConfig)
    if config.gpus:
        # vLLM's processes inherit the restriction, which CUDA reads at its first use.
        os.environ['CUDA_VISIBLE_DEVICES'] = ','.join(config.gpus)
    start_telemetry(config.telemetry, service=config.service)
    try:
        with serving_admin(config.admin_address(), service=config.service) as readiness:
            run_service(serve(config, readiness))
    finally:
        stop_telemetry()


async def serve(config: SamplerConfig, readiness: Readiness) -> None:
    """Serve until SIGINT or SIGTERM, or until a gateway requests that this sampler leave the fleet.

    Raises:
        SystemExit: The service cannot start, in which case the message states the cause, or the engine failed
            permanently.
    """
    async with opened_ports(config, readiness) as ports:
        try:
            with readiness.step('find the model', base_model=config.base_model):
                folder = await asyncio.to_thread(resolve_model, config.base_model)
            with readiness.step('load the model', base_model=config.base_model, weight_bytes=weight_bytes(folder)):
                engine = await asyncio.to_thread(make_engine, config, str(folder))
        except (HubError, OSError, ValueError) as error:
            raise SystemExit(f'twinkle-sampler: cannot load the model: {error}') from error
        await serve_engine(config, engine, ports)


async def serve_engine(config: SamplerConfig, engine: SamplerEngine, ports: ServicePorts) -> None:
    """Serve a loaded engine until the service stops; see `serve`."""
    devices = open_devices(
        config.device_transports, service=config.service, is_encrypted=config.tls.certificate is not None
    )
    segments = open_segments(config.shared_memory)
    sources = make_sources(config, segments, devices)
    versions = make_versions(config, engine, sources)
    admission = make_admission(config, engine)
    try:
        host_id = segments.host_id if segments else ''
        server = make_server(config, engine, versions, admission, host_id=host_id, devices=devices)
        server.use_ports(ports)
        fleet = make_fleet(config, make_replica(config, engine, versions, admission), sources, server)
        versions.start()
        with observed(config, engine, admission, versions):
            await serve_until_engine_fails(server, engine, config, fleet)
    finally:
        await versions.close()
        await engine.close()
        await sources.close()


async def serve_until_engine_fails(
    server: RpcServer, engine: SamplerEngine, config: SamplerConfig, fleet: FleetMember | None = None
) -> None:
    """Serve until the process is stopped, or until the engine fails permanently.

    Raises:
        SystemExit: The engine failed; a supervisor should restart this process.
    """
    while_serving = fleet.serving if fleet else None
    serving = asyncio.create_task(serve_until_stopped(server, config, while_serving=while_serving))
    failure = asyncio.create_task(engine.wait_until_failed())
    try:
        await asyncio.wait({serving, failure}, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            raise SystemExit(f'{config.service}: the {engine.facts.engine} engine failed; restart this service')
        await serving
    finally:
        for task in (serving, failure):
            task.cancel()
        await asyncio.wait({serving, failure})
        await server.stop(timedelta())
        if fleet is not None:
            await fleet.close()


@contextmanager
def observed(config: SamplerConfig, engine: SamplerEngine, admission: Admission, versions: Versions) -> Iterator[None]:
    """Report the load and memory of the engine and the loaded versions as metrics during the block."""

    def sequences() -> Mapping[str, int]:
        load = admission.load
        return {'running': load.running_sequences, 'waiting': load.waiting_sequences}

    with ExitStack() as stack:
        stack.enter_context(measures.sequences.observing(sequences))
        stack.enter_context(measures.kv_usage.observing(lambda: admission.load.kv_usage))
        stack.enter_context(measures.resident_versions.observing(lambda: len(versions.all_resident())))
        if config.engine == 'vllm':
            stack.enter_context(measures.prefix_hits.observing(lambda: admission.load.prefix_hit_rate))
        if config.engine == 'vllm' or config.torch.device.startswith('cuda'):
            stack.enter_context(measures.device_memory.observing(lambda: engine.device_memory))
        yield


def make_sources(config: SamplerConfig, segments: Segments | None, devices: Devices | None = None) -> WeightSources:
    return WeightSources(
        config.checkpoint_address,
        internal_token=config.internal_token,
        tls=config.tls,
        segments=segments,
        devices=devices,
        patience=timedelta(seconds=config.relay_patience_seconds),
    )


def make_versions(config: SamplerConfig, engine: SamplerEngine, source: WeightSource) -> Versions:
    """Return the versions of the followed run if one is configured, otherwise the versions of all adapters."""
    if run := followed_run_of(config):
        return FullParameterRun(engine, source, run)
    retention = Retention(
        max_versions=config.max_resident_versions,
        max_bytes=config.max_resident_bytes,
        max_followers=config.max_followed_adapters,
        idle=timedelta(seconds=config.follow_idle_seconds),
    )
    return AdapterVersions(engine, source, retention)


def followed_run_of(config: SamplerConfig) -> AdapterKey | None:
    return AdapterKey(config.follow_tenant, config.follow_run) if config.follow_run else None


def make_admission(config: SamplerConfig, engine: SamplerEngine) -> Admission:
    # With twice as many slots as running sequences, the engine's queue stays filled; other prompts wait in fair order.
    return Admission(engine, slots=2 * engine.facts.max_sequences, queue_limit=config.limits.queue_length)


def make_server(
    config: SamplerConfig,
    engine: SamplerEngine,
    versions: Versions,
    admission: Admission,
    *,
    host_id: str = '',
    devices: Devices | None = None,
) -> RpcServer:
    """Create the server with its services. It does not listen yet.

    Args:
        config: Configuration of the service.
        engine: Engine that samples.
        versions: Versions that requests may use.
        admission: Slots of the engine.
        host_id: Id of the shared memory that contains this process's segments; empty without shared memory.
        devices: Device transports for relayed versions; None to send them over gRPC only.
    """
    runner = PromptRunner(
        engine, versions, admission, admission.requests, is_base_prefix_shared=config.share_base_prefixes
    )
    sampling = Sampling(engine, runner, max_concurrent_prompts=admission.slots)
    control = EngineControl(engine, admission, admission.requests)
    relay = Relay(versions, Sender(Threads('relay', count=1), devices=devices), host_id=host_id)
    server = RpcServer(
        config,
        authenticator=InternalAuthenticator(config.internal_token),
        endpoints=make_endpoints(sampling, control, ResidentAdapters(versions), relay),
        facts=lambda: server_facts(
            engine.facts,
            patches=config.torch.patches if config.engine == 'torch' else {},
            is_dedicated=bool(config.follow_run),
        ),
    )
    server.on_drain(control.close)
    server.on_drain(relay.close)
    return server


def server_facts(facts: EngineFacts, *, patches: Mapping[str, Mapping[str, Any]], is_dedicated: bool) -> ServerFacts:
    """Return the properties that GetServerInfo reports: those of the engine, and the patches of its base model."""
    model = BaseModelFacts(
        base_model=facts.base_model,
        context_tokens=facts.context_tokens,
        vocabulary_size=facts.vocabulary_size,
        parameter_count=facts.parameter_count,
        dtype=facts.dtype,
        is_sampleable=not is_dedicated,
        patches=patches,
        tool_call_format=facts.tool_call_format,
    )
    return ServerFacts(
        base_models=[model], components={'engine': [facts.engine]}, engine_version=versioned(facts.engine)
    )


def make_replica(config: SamplerConfig, engine: SamplerEngine, versions: Versions, admission: Admission) -> Replica:
    return Replica(new_id('rp'), engine.facts, admission, versions, followed_run=followed_run_of(config))


def make_fleet(
    config: SamplerConfig, replica: Replica, sources: WeightSources, server: RpcServer
) -> FleetMember | None:
    """Return the membership in the gateways' fleet; None if no gateway is configured."""
    if not config.gateways:
        return None
    channels = {
        address: open_channel(address, internal_token=config.internal_token, tls=config.tls, service='gateway')
        for address in config.gateways
    }
    membership = Membership(
        [FleetClient(address, channel) for address, channel in channels.items()],
        report=lambda is_draining: replica.report(config.advertise or server.address, is_draining=is_draining),
        use_checkpoint=sources.use_checkpoint,
        use_relay=sources.use_relay,
        max_interval=timedelta(seconds=config.lease_seconds),
    )
    replica.on_change(membership.report_soon)
    return FleetMember(membership, server, replica, list(channels.values()))


def make_engine(config: SamplerConfig, folder: str) -> SamplerEngine:
    """Load the model and start the engine, which takes seconds. Only the selected engine's libraries are imported.

    Raises:
        HubError, OSError, ValueError: The model cannot be loaded, or an option is invalid.
    """
    with collections_paused():
        return make_vllm_engine(config, folder) if config.engine == 'vllm' else make_torch_engine(config, folder)


def make_vllm_engine(config: SamplerConfig, folder: str) -> SamplerEngine:
    backend = importlib.import_module('twinkle_services.sampler.backends.vllm_engine')
    options = backend.VllmEngineOptions(
        base_model=config.base_model,
        folder=folder,
        arguments=config.vllm.engine_args,
        thread_count=config.vllm.thread_count,
        hang_seconds=config.vllm.hang_seconds,
    )
    return backend.VllmEngine(options)


def make_torch_engine(config: SamplerConfig, folder: str) -> SamplerEngine:
    importlib.import_module('torch').set_num_threads(config.torch.thread_count)
    backend = importlib.import_module('twinkle_services.sampler.backends.torch_engine')
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


if __name__ == '__main__':
    main()
