"""Assembles the model service from its parts.

This module imports torch, so `twinkle_services.model.__main__` imports it only after it has opened the admin port.
"""

import asyncio
import json
import os
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from typing import Any, NoReturn

import structlog

from twinkle.hub import HubError, resolve_model, weight_bytes
from twinkle.infra import DeviceMesh, NotSupportedYet
from twinkle.model.pass_size import PASS_ON_A_CPU, PassSize, fitting_pass
from twinkle.nn import device_memory, float32_products
from twinkle_services.kit.clock import SystemClock
from twinkle_services.kit.resumable_uploads import UploadQuota, UploadRules, UploadStore
from twinkle_services.kit.rpc.auth import InternalAuthenticator
from twinkle_services.kit.rpc.channel import open_channel
from twinkle_services.kit.rpc.server import RpcServer, serve_until_stopped
from twinkle_services.kit.rpc.service_ports import opened_ports
from twinkle_services.kit.telemetry import Readiness, measures, start_telemetry
from twinkle_services.kit.weights import open_segments
from twinkle_services.model.api.endpoints import make_endpoints
from twinkle_services.model.api.record_codec import ProtoRecordCodec
from twinkle_services.model.application.admission import QueueLimits
from twinkle_services.model.application.create_adapter import AdapterLimits
from twinkle_services.model.application.resident import ResidencyBounds
from twinkle_services.model.application.service import Limits, ModelService, make_service
from twinkle_services.model.backends.checkpoint_client import CheckpointClient
from twinkle_services.model.backends.data_client import MAX_BATCH_BYTES, DataClient, NoDataService
from twinkle_services.model.backends.dry_run import EngineDryRun
from twinkle_services.model.backends.group import GroupBackend, LoadOptions
from twinkle_services.model.backends.group.host import EngineHost
from twinkle_services.model.backends.group.loading import load_engine
from twinkle_services.model.backends.group.torchrun_group import follow
from twinkle_services.model.backends.journal.environment import ReplayEnvironment, log_environment_changes
from twinkle_services.model.backends.journal.memory import MemoryJournal
from twinkle_services.model.backends.journal.sqlite_journal import SqliteJournal
from twinkle_services.model.backends.merged_folders import MergedFolders
from twinkle_services.model.config import ModelConfig
from twinkle_services.model.domain.loader_batch import BatchSource
from twinkle_services.model.ports import Journal, Ports, TrainerBackend, WeightStore

MAX_UPLOADS = 256
"""Maximum number of batch uploads that a tenant may have at the same time."""
_EXPIRY_INTERVAL = timedelta(days=1)
"""Time between two sweeps for unused adapters."""
_GAP_SECONDS = 5.0
"""Maximum seconds that an operation waits for an earlier one that the journal may have lost."""
LOAD_ERRORS = (HubError, ImportError, OSError, ValueError, NotSupportedYet)
"""Errors of `load_backend` that the operator can remedy."""
FULL_GRADIENT_SUM = 'full_gradient_sum'
"""Key in the replay environment for the order in which the gradients of full-parameter runs are added."""
TREE_SUM = 'tree'
"""Order that does not depend on the mesh; see `twinkle.model.engine.gradient.GradientSum`."""
_log = structlog.get_logger('model')


def repeat_calls(config: ModelConfig) -> None:
    """Repeat the calls of the mesh's first process until that process stops.

    Raises:
        SystemExit: The model cannot be loaded; the message states the cause.
    """
    # Only the first process opens the files and ports of the service.
    unset = {'log_file': None, 'trace_dir': None, 'metrics_port': 0, 'otlp_endpoint': ''}
    start_telemetry(config.telemetry.model_copy(update=unset), service=f'model rank {os.environ["RANK"]}')
    try:
        options = load_options(config)
        host = EngineHost(load_engine(options), options)
    except LOAD_ERRORS as error:
        raise SystemExit(f'twinkle-model: cannot load the model: {error}') from error
    follow(host, silence_seconds=options.silence_seconds)


async def serve(config: ModelConfig, readiness: Readiness) -> None:
    """Recover the adapters of the last run, then serve until SIGINT or SIGTERM.

    Raises:
        SystemExit: The server cannot listen, or the model cannot be loaded; the message states the cause.
        JournalRefused, JournalUnavailable: See `open_journal`.
        BaseModelNotFound: See `Recover`.
    """
    async with AsyncExitStack() as stack:
        server_ports = await stack.enter_async_context(opened_ports(config, readiness))
        backend = await load_and_report(config, readiness)
        stack.push_async_callback(backend.close)
        with readiness.step('open the journal', state_dir=str(config.state_dir)):
            journal = await open_journal(config, backend)
        stack.push_async_callback(journal.close)
        channel = await stack.enter_async_context(
            open_channel(
                config.checkpoint_address, internal_token=config.internal_token, tls=config.tls, service='checkpoint'
            )
        )
        store = CheckpointClient(channel, segments=open_segments(config.shared_memory), base_model=config.base_model)
        batches = await open_batches(config, stack)
        ports = make_ports(config, backend, store, journal, batches=batches)
        stack.push_async_callback(ports.exporter.close)
        service = make_service(ports, make_limits(config))
        stack.push_async_callback(service.close)
        stack.enter_context(service.observed())
        if config.device.startswith('cuda'):
            stack.enter_context(measures.device_memory.observing(partial(device_memory, config.device)))
        with readiness.step('recover the adapters'):
            await service.recover()
        stack.callback(start_job('cleanup', service.cleanup.repeat(config.idle_seconds / 10)).cancel)
        stack.callback(start_job('expiry', service.expiry.repeat(_EXPIRY_INTERVAL)).cancel)
        server = make_server(config, service, backend)
        server.use_ports(server_ports)
        await serve_until_stopped(server, config)


def start_job(name: str, job: Coroutine[Any, Any, NoReturn]) -> asyncio.Task[NoReturn]:
    """Run a periodic job. An error of the job is logged immediately, and the service continues without the job."""

    def report(task: asyncio.Task[NoReturn]) -> None:
        if not task.cancelled():
            _log.error('periodic job failed; restart the service to resume it', job=name, exc_info=task.exception())

    task = asyncio.create_task(job, name=name)
    task.add_done_callback(report)
    return task


async def open_batches(config: ModelConfig, stack: AsyncExitStack) -> BatchSource:
    """Connect to the data service until `stack` closes; if none is configured, refuse batches from loaders."""
    if not config.data_address:
        return NoDataService()
    channel = open_channel(
        config.data_address,
        internal_token=config.internal_token,
        tls=config.tls,
        service='data',
        message_bytes=MAX_BATCH_BYTES,
    )
    return DataClient(await stack.enter_async_context(channel))


async def open_journal(config: ModelConfig, backend: TrainerBackend) -> Journal:
    """Open the configured journal, which only one process may use at a time.

    Raises:
        JournalRefused: The journal is in use, damaged, incomplete, or of a different version or engine.
        JournalUnavailable: The disk failed.
    """
    if config.journal == 'none':
        return MemoryJournal(undo_steps=config.undo_steps)
    folder = config.state_dir.resolve() / 'journal'
    journal = await SqliteJournal.open(
        folder,
        codec=codec_of(backend),
        engine=engine_name(config, dtype=backend.facts().base_models[0].dtype),
        undo_steps=config.undo_steps,
        is_loss_accepted=config.accept_data_loss,
    )
    journal.peers = {name: path.resolve() / 'journal' for name, path in config.peer_trainers.items()}
    if config.forget_crashes:
        await journal.forget_crashes()
    log_environment_changes(folder, replay_environment(config))
    return journal


def codec_of(backend: TrainerBackend, *, max_batch_examples: int | None = None) -> ProtoRecordCodec:
    """Return the codec that reads and writes the journal's records; `max_batch_examples` limits fetched batches."""
    vocabulary_size = backend.facts().base_models[0].vocabulary_size
    return ProtoRecordCodec(vocabulary_size=vocabulary_size, max_batch_examples=max_batch_examples)


def replay_environment(config: ModelConfig) -> ReplayEnvironment:
    """Return the settings and library versions that may change the floating-point results of a replay."""
    # FSDP adds the gradients of full-parameter runs in an order that depends on the mesh.
    is_sum_by_mesh = config.full_parameters and config.mesh.fsdp > 1
    return {
        'backend': config.backend,
        'device': config.device,
        FULL_GRADIENT_SUM: f'dp {config.mesh.dp}, fsdp {config.mesh.fsdp}' if is_sum_by_mesh else TREE_SUM,
        'gradient_sum': f'{TREE_SUM}, rows of common prefixes once',
        'layer_parts': config.mesh.tp,
        'float32_products': float32_products(config.device, is_tf32_allowed=config.allow_tf32),
        'pass_tokens': pass_size_of(config).row_count,
        'row_parts': config.mesh.ulysses,
        # torchrun sets OMP_NUM_THREADS, which determines the default of torch.
        'thread_count': config.thread_count or int(os.environ.get('OMP_NUM_THREADS') or os.cpu_count() or 1),
        'torch': version('torch'),
        'transformers': version('transformers'),
    }


def engine_name(config: ModelConfig, *, dtype: str) -> str:
    """Return the name of the engine; a journal can be replayed only on an engine of the same name."""
    patches = [f'{name} {json.dumps(dict(options), sort_keys=True)}' for name, options in config.patches.items()]
    quantized = [] if config.quantization is None else [f'weights in {config.quantization}']
    return ' with '.join([f'{config.base_model} in {dtype}', *quantized, *patches])


async def load_and_report(config: ModelConfig, readiness: Readiness) -> GroupBackend:
    """Load the configured engine, and report each step of loading to `readiness`.

    Raises:
        SystemExit: The model cannot be loaded; the message states the cause.
    """
    try:
        with readiness.step('find the model', base_model=config.base_model):
            folder = await asyncio.to_thread(resolve_model, config.base_model)
        with readiness.step('load the model', base_model=config.base_model, weight_bytes=weight_bytes(folder)):
            return await load_backend(config)
    except LOAD_ERRORS as error:
        raise SystemExit(f'twinkle-model: cannot load the model: {error}') from error


async def load_backend(config: ModelConfig) -> GroupBackend:
    """Load the configured engine, which takes several seconds; see `GroupBackend.load` for the errors."""
    return await GroupBackend.load(load_options(config))


def pass_size_of(config: ModelConfig) -> PassSize:
    """Return the configured size of passes; a size that is not configured is chosen for the device.

    Raises:
        HubError: The model cannot be found or downloaded.
        OSError, ValueError: The model's config.json is missing or lacks a size, or there is no GPU.
    """
    rows, is_checkpointed, chosen = config.pass_tokens, config.activation_checkpointing, PASS_ON_A_CPU
    is_complete = rows is not None and is_checkpointed is not None
    if not is_complete and config.device.startswith('cuda'):
        # Full-parameter training also stores gradients and two moments. A weight in four bits takes 0.57 bytes instead
        # of two or four; the layers that are not quantized take more.
        copies = 4.0 if config.full_parameters else 0.35 if config.quantization else 1.0
        chosen = fitting_pass(
            resolve_model(config.base_model),
            dtype=dtype_of(config),
            device=config.device,
            memory_share=config.gpu_memory_share,
            copies=copies / (config.mesh.fsdp * config.mesh.tp * config.mesh.pp),
        )
    return PassSize(
        row_count=chosen.row_count if rows is None else rows,
        is_checkpointed=chosen.is_checkpointed if is_checkpointed is None else is_checkpointed,
    )


def dtype_of(config: ModelConfig) -> str:
    """Return the data type of the base model's weights; with full-parameter training, 'auto' selects float32."""
    return 'float32' if config.dtype == 'auto' and config.full_parameters else config.dtype


def load_options(config: ModelConfig) -> LoadOptions:
    size = pass_size_of(config)
    return LoadOptions(
        base_model=config.base_model,
        dtype=dtype_of(config),
        device=config.device,
        thread_count=config.thread_count,
        batch_tokens=config.max_batch_tokens,
        pass_tokens=size.row_count,
        is_checkpointed=size.is_checkpointed,
        gpu_memory_share=config.gpu_memory_share,
        is_tf32_allowed=config.allow_tf32,
        quantization=config.quantization,
        lora_rank=config.max_lora_rank,
        loss_plugins=config.loss_plugins,
        patches=config.patches,
        is_megatron=config.backend == 'megatron',
        mesh=DeviceMesh.from_sizes(
            dp_size=config.mesh.dp,
            fsdp_size=config.mesh.fsdp,
            ulysses_size=config.mesh.ulysses,
            tp_size=config.mesh.tp,
            pp_size=config.mesh.pp,
        ),
        silence_seconds=config.workers.silence_seconds,
    )


def make_limits(config: ModelConfig) -> Limits:
    return Limits(
        adapters=AdapterLimits(tenant=config.max_adapters_per_tenant, total=config.max_adapters),
        lora_rank=config.max_lora_rank,
        batch_tokens=pass_size_of(config).row_count * config.mesh.pass_count,
        batch_examples=config.max_batch_examples,
        batch_seconds=config.batch_seconds,
        tenant_weights=config.tenant_weights,
        queue=QueueLimits(operation_count=config.limits.queue_length, request_bytes=config.queue_bytes),
        gap_seconds=min(config.gap_seconds, _GAP_SECONDS) if config.accept_data_loss else config.gap_seconds,
        residency=ResidencyBounds(
            resident_adapters=config.max_resident_adapters,
            idle_seconds=config.idle_seconds,
            snapshot_device_seconds=config.snapshot_device_seconds,
            snapshot_operations=config.snapshot_operations,
            is_lease_allowed=config.full_parameters,
            lease_quiet_seconds=config.lease_quiet_seconds,
        ),
        unused_for=timedelta(days=config.parked_adapter_days) if config.parked_adapter_days else None,
    )


def make_ports(
    config: ModelConfig,
    backend: GroupBackend,
    store: WeightStore,
    journal: Journal,
    *,
    batches: BatchSource | None = None,
) -> Ports:
    """Create the service's ports. Without `batches`, batches from loaders are refused."""
    clock = SystemClock()
    rules = UploadRules(
        time_to_live=timedelta(seconds=config.upload_seconds),
        upload_quota=UploadQuota('uploads', MAX_UPLOADS),
        byte_quota=UploadQuota('upload_bytes', config.upload_bytes),
    )
    uploads = UploadStore(config.state_dir.resolve() / 'batch-uploads', clock=clock, rules=rules)
    exports = config.state_dir.resolve() / 'exports'
    exporter = MergedFolders(exports, base_model=config.base_model, tenant_limit=config.merged_models_per_tenant)
    return Ports(
        backend=backend,
        estimator=EngineDryRun(
            backend.group, backend.engine.model, clock=clock, process_count=config.mesh.process_count
        ),
        store=store,
        exporter=exporter,
        uploads=uploads,
        batches=batches or NoDataService(),
        journal=journal,
        codec=codec_of(backend, max_batch_examples=config.max_batch_examples),
        clock=clock,
    )


def make_server(config: ModelConfig, service: ModelService, backend: TrainerBackend) -> RpcServer:
    """Create the gRPC server. It does not listen yet."""
    server = RpcServer(
        config,
        authenticator=InternalAuthenticator(config.internal_token),
        endpoints=make_endpoints(service),
        facts=service.facts,
    )
    server.on_drain(service.directory.close, service.operations.close)
    return server
