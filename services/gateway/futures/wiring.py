"""Puts futures together: their stores, who carries them out, and who forgets them."""

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from services.gateway.config import FuturesConfig, GatewayConfig
from services.gateway.forwarding.model_channels import ModelChannels
from services.gateway.futures.bulletin import Bulletin
from services.gateway.futures.create_adapter import CreateAdapter
from services.gateway.futures.delete_adapter import DeleteAdapter
from services.gateway.futures.execute import ExecuteOperation
from services.gateway.futures.expire import ExpireFutures
from services.gateway.futures.follow_topic import FollowTopic
from services.gateway.futures.grpc_trainer import GrpcTrainer
from services.gateway.futures.payload_files import PayloadFiles
from services.gateway.futures.peers import make_peers, sharing
from services.gateway.futures.persistence import Persistence
from services.gateway.futures.ports import Executor
from services.gateway.futures.refuse import REFUSED, Refuse
from services.gateway.futures.runner import Runner, RunnerLimits
from services.gateway.futures.verbs import FutureVerbs
from services.gateway.futures.world import World
from services.gateway.quotas.futures import QuotaRoom
from services.gateway.quotas.wiring import FutureQuotas, OpenQuotas
from services.gateway.sampling.fair_queue import Places
from services.gateway.store.database import Database
from services.kit.byte_gate import ByteGate
from services.kit.clock import Clock
from services.kit.rpc.context import current_caller


@dataclass(frozen=True)
class OpenFutures:
    """Futures, and what is to be done beside serving them."""

    verbs: FutureVerbs
    executors: dict[str, Executor]
    """By kind; may be added to until the jobs begin."""
    follow: FollowTopic
    jobs: tuple[Callable[[], Coroutine[Any, Any, Any]], ...]


@asynccontextmanager
async def open_futures(
    config: GatewayConfig, database: Database, *, models: ModelChannels | None, quotas: FutureQuotas, clock: Clock
) -> AsyncIterator[OpenFutures]:
    """Carry futures out during the block, once the jobs run; what is not finished then stays for the next start.

    Args:
        config: of the gateway.
        database: keeps them.
        models: find the model service of a call; None: training is not part of this deployment.
        quotas: what they are held to, and counted by.
        clock: tells the time.
    """
    payloads = PayloadFiles(config.payload_folder(), is_synced=config.is_commit_synced())
    peers = await make_peers(config, database, payloads)
    options = config.futures
    world = World(
        store=quotas.all.futures(database),
        payloads=payloads,
        room=_room(options, quotas.all),
        memory=_memory(options),
        unordered_memory=_memory(options),
        bulletin=Bulletin(),
        persistence=Persistence(),
        peers=peers,
        caller=current_caller,
        clock=clock,
    )
    executors: dict[str, Executor] = {REFUSED: Refuse()}
    if models is not None:
        trainer = quotas.models.trainer(GrpcTrainer(models, internal_token=config.internal_token))
        executors['create_adapter'] = CreateAdapter(trainer, world.persistence)
        executors['delete_adapter'] = DeleteAdapter(trainer, world.store, world.persistence)
        executors['execute'] = ExecuteOperation(trainer, world.store, world.persistence)
    verbs = FutureVerbs(world, Runner(world, executors, _limits(options, quotas.all)))
    expire = ExpireFutures(
        world.store, payloads, results_for=options.results_for, records_for=options.records_for, clock=clock
    )
    try:
        async with sharing(config, peers, verbs) as carry_on:
            jobs = (carry_on, lambda: expire.keep_on(interval=options.sweep_interval))
            yield OpenFutures(verbs, executors, FollowTopic(world), jobs)
    finally:
        await verbs.close()
        payloads.close()


def _room(options: FuturesConfig, quotas: OpenQuotas) -> QuotaRoom:
    return quotas.room(
        Places(tenant=options.waiting_per_tenant, total=options.waiting),
        sizes=Places(tenant=options.waiting_bytes_per_tenant, total=options.waiting_bytes),
    )


def _memory(options: FuturesConfig) -> ByteGate:
    return ByteGate(tenant_bytes=options.running_bytes_per_tenant, total_bytes=options.running_bytes, wait_seconds=None)


def _limits(options: FuturesConfig, quotas: OpenQuotas) -> RunnerLimits:
    return RunnerLimits(
        lanes=Places(tenant=options.lanes_per_tenant, total=options.lanes),
        unordered=Places(tenant=options.unordered_per_tenant, total=options.unordered),
        patience=options.gap,
        weight_of=quotas.book.weight_of,
        is_held=quotas.rates.is_owing,
    )
