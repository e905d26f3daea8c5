"""The model service as a process: `python -m services.model --help`."""

import asyncio
from contextlib import AsyncExitStack

from services.kit.clock import SystemClock
from services.kit.config import load_config
from services.kit.rpc.auth import InternalAuthenticator
from services.kit.rpc.channel import open_channel
from services.kit.rpc.server import RpcServer, serve_until_stopped
from services.kit.telemetry import start_telemetry, stop_telemetry
from services.model.api.adapter_servicer import AdapterServicer
from services.model.api.endpoints import endpoints
from services.model.api.training_servicer import TrainingServicer
from services.model.application.admission import Admission
from services.model.application.create_adapter import CreateAdapter
from services.model.application.delete_adapter import DeleteAdapter
from services.model.application.directory import AdapterDirectory
from services.model.application.execute_operation import ExecuteOperation
from services.model.application.find_operation import FindOperation
from services.model.application.train_stream import TrainStream
from services.model.backends.checkpoint_client import CheckpointClient
from services.model.backends.local import LocalBackend
from services.model.config import ModelConfig
from services.model.ports import TrainerBackend, WeightStore


def build_server(config: ModelConfig, backend: TrainerBackend, store: WeightStore) -> RpcServer:
    """Put the service together around an engine and a store."""
    clock = SystemClock()
    directory = AdapterDirectory()
    execute = ExecuteOperation(
        directory,
        backend,
        store,
        Admission(config.limits.queue_length),
        clock=clock,
        gap_seconds=config.gap_seconds,
    )
    create = CreateAdapter(
        directory,
        backend,
        store,
        clock=clock,
        max_lora_rank=config.max_lora_rank,
        max_adapters=config.max_adapters,
    )
    adapters = AdapterServicer(  # pyright: ignore[reportAbstractUsage] - the kit answers for unbuilt verbs
        directory, create, DeleteAdapter(directory, backend, execute)
    )
    training = TrainingServicer(  # pyright: ignore[reportAbstractUsage] - as above
        execute,
        TrainStream(execute),
        FindOperation(directory, execute),
        vocabulary_size=lambda: backend.facts().base_models[0].vocabulary_size,
    )
    return RpcServer(
        config,
        authenticator=InternalAuthenticator(config.internal_token),
        endpoints=endpoints(adapters, training),
        facts=backend.facts,
    )


async def load_backend(config: ModelConfig) -> LocalBackend:
    """Load the engine that the configuration describes."""
    return await LocalBackend.load(
        config.base_model,
        dtype=config.dtype,
        device=config.device,
        thread_count=config.thread_count,
        max_batch_tokens=config.max_batch_tokens,
        max_lora_rank=config.max_lora_rank,
    )


async def main() -> None:
    """Serve until stopped."""
    config = load_config(ModelConfig)
    start_telemetry(config.telemetry, service=config.service)
    async with AsyncExitStack() as stack:
        stack.callback(stop_telemetry)
        backend = await load_backend(config)
        stack.push_async_callback(backend.close)
        channel = await stack.enter_async_context(
            open_channel(config.checkpoint_address, internal_token=config.internal_token)
        )
        await serve_until_stopped(build_server(config, backend, CheckpointClient(channel)), config)


if __name__ == '__main__':
    asyncio.run(main())
