"""Puts futures together: their stores, who carries them out, and who forgets them."""

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from services.gateway.config import FuturesConfig, GatewayConfig
from services.gateway.futures.bulletin import Bulletin
from services.gateway.futures.counted_futures import CountedFutureStore
from services.gateway.futures.create_adapter import CreateAdapter
from services.gateway.futures.delete_adapter import DeleteAdapter
from services.gateway.futures.execute import ExecuteOperation
from services.gateway.futures.expire import ExpireFutures
from services.gateway.futures.follow_topic import FollowTopic
from services.gateway.futures.limits import SAMPLE_KIND, QuotaRoom, SampleTally
from services.gateway.futures.payload_files import PayloadFiles
from services.gateway.futures.peers import make_peers, sharing
from services.gateway.futures.persistence import Persistence
from services.gateway.futures.ports import Executor
from services.gateway.futures.refuse import REFUSED, Refuse
from services.gateway.futures.rules import Bounds
from services.gateway.futures.runner import Runner, RunnerLimits
from services.gateway.futures.sample import SamplePrompt
from services.gateway.futures.trainer_ports import Trainer
from services.gateway.futures.verbs import FutureVerbs
from services.gateway.futures.world import World
from services.gateway.quotas.quotas import Quotas
from services.gateway.sampling.convert import batch_request_for_weights
from services.gateway.sampling.handles import SamplingHandles
from services.gateway.sampling.limits import SamplingGate
from services.gateway.sampling.ports import WeightFacts
from services.gateway.sampling.sampling import Sampling
from services.gateway.sampling.sql import SqlHandleStore
from services.gateway.store.database import Database
from services.kit.byte_gate import ByteGate
from services.kit.clock import Clock
from services.kit.rpc.context import acting_for, current_caller


@dataclass(frozen=True)
class OpenFutures:
    """Futures, and what is to be done beside serving them."""

    verbs: FutureVerbs
    executors: dict[str, Executor]
    """By kind; may be added to until the jobs begin."""
    follow: FollowTopic
    handles: SamplingHandles
    is_rate_limited: Callable[[str], bool]
    """Whether a tenant's futures wait until it has paid for the tokens it used."""
    jobs: tuple[Callable[[], Coroutine[Any, Any, Any]], ...]


@dataclass(frozen=True, kw_only=True)
class FutureSampling:
    """Parts that run futures that sample."""

    verbs: Sampling
    gate: SamplingGate
    weights: WeightFacts


@asynccontextmanager
async def open_futures(
    config: GatewayConfig,
    database: Database,
    *,
    trainer: Trainer | None,
    sampling: FutureSampling,
    quotas: Quotas,
    clock: Clock,
) -> AsyncIterator[OpenFutures]:
    """Run futures during the block, once the jobs run. Unfinished futures resume at the next start.

    Args:
        config: Of the gateway.
        database: Stores futures and sampling handles.
        trainer: Calls the model service; None where the deployment has none.
        sampling: Completes the prompts of sampling futures.
        quotas: Limits of tenants, and the meter of their usage.
        clock: Tells the time.
    """
    payloads = PayloadFiles(config.payload_folder(), is_synced=config.is_commit_synced())
    peers = await make_peers(config, database, payloads)
    options, tally = config.futures, SampleTally(quotas.meter)
    world = World(
        store=CountedFutureStore(database, on_settled=tally.settled),
        payloads=payloads,
        room=_room(options, sampling.gate),
        memory=_memory(options),
        unordered_memory=_memory(options),
        bulletin=Bulletin(),
        persistence=Persistence(),
        peers=peers,
        caller=current_caller,
        clock=clock,
    )
    executors: dict[str, Executor] = {REFUSED: Refuse()}
    if trainer is not None:
        executors['create_adapter'] = CreateAdapter(trainer, world.persistence)
        executors['delete_adapter'] = DeleteAdapter(trainer, world.store, world.persistence)
        executors['execute'] = ExecuteOperation(trainer, world.store, world.persistence)
    verbs = FutureVerbs(world, Runner(world, executors, _limits(options, quotas)))
    handles = SamplingHandles(
        SqlHandleStore(database), sampling.weights, verbs.published_result, caller=current_caller, clock=clock
    )
    sample = SamplePrompt(
        sampling.verbs.complete, handles, batch_request_for_weights, world.persistence, acting_for=acting_for
    )
    sample.note = tally.note
    executors[SAMPLE_KIND] = sample
    expire = ExpireFutures(
        world.store, payloads, results_for=options.results_for, records_for=options.records_for, clock=clock
    )
    try:
        async with sharing(config, peers, verbs) as carry_on:
            jobs = (carry_on, lambda: expire.keep_on(interval=options.sweep_interval))
            yield OpenFutures(verbs, executors, FollowTopic(world), handles, quotas.rates.is_owing, jobs)
    finally:
        await verbs.close()
        payloads.close()


def _room(options: FuturesConfig, gate: SamplingGate) -> QuotaRoom:
    return QuotaRoom(
        Bounds(per_tenant=options.waiting_per_tenant, total=options.waiting),
        sizes=Bounds(per_tenant=options.waiting_bytes_per_tenant, total=options.waiting_bytes),
        gate=gate,
    )


def _memory(options: FuturesConfig) -> ByteGate:
    return ByteGate(tenant_bytes=options.running_bytes_per_tenant, total_bytes=options.running_bytes, wait_seconds=None)


def _limits(options: FuturesConfig, quotas: Quotas) -> RunnerLimits:
    return RunnerLimits(
        lanes=Bounds(per_tenant=options.lanes_per_tenant, total=options.lanes),
        unordered=Bounds(per_tenant=options.unordered_per_tenant, total=options.unordered),
        patience=options.gap,
        weight_of=quotas.table.weight_of,
        is_held=quotas.rates.is_owing,
    )
