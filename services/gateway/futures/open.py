"""Wires futures to their stores and executors, and the sampling handles that depend on futures."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from twinkle_services.gateway.config import FuturesConfig, GatewayConfig
from twinkle_services.gateway.fleet.upstreams import GrpcLookups
from twinkle_services.gateway.futures.capacity import FutureCapacity
from twinkle_services.gateway.futures.executors import FailRefused, SamplePrompt, SampleTally, training_executors
from twinkle_services.gateway.futures.futures import Futures
from twinkle_services.gateway.futures.gateway_lease import GatewayLease
from twinkle_services.gateway.futures.payloads import PayloadFiles
from twinkle_services.gateway.futures.ports import Trainer
from twinkle_services.gateway.futures.records import Expiry, FutureRecords
from twinkle_services.gateway.futures.rules import REFUSED_KIND, SAMPLE_KIND, Bounds, PayloadsNotShared
from twinkle_services.gateway.futures.runner import Runner, RunnerLimits
from twinkle_services.gateway.futures.sql import SqlFutureStore
from twinkle_services.gateway.futures.sql_peers import SqlPeers
from twinkle_services.gateway.futures.waiters import Waiters
from twinkle_services.gateway.quotas.quotas import Quotas
from twinkle_services.gateway.sampling.handles import SamplingHandles
from twinkle_services.gateway.sampling.sampling import Sampling
from twinkle_services.gateway.sampling.sql import SqlHandleStore
from twinkle_services.gateway.sessions.sweep import Job
from twinkle_services.gateway.store.database import Database
from twinkle_services.kit.byte_gate import ByteGate
from twinkle_services.kit.clock import Clock
from twinkle_services.kit.retry import Retry
from twinkle_services.kit.rpc.context import current_caller
from twinkle_services.kit.telemetry import measures

_HEARTBEATS = 10
"""Number of heartbeats per lease."""
_SILENT_HEARTBEATS = 3
"""Number of missed heartbeats after which a gateway without a notification connection counts as dead."""


@dataclass(frozen=True)
class FutureService:
    """Futures, and the handles that sampling futures use."""

    futures: Futures
    handles: SamplingHandles


@asynccontextmanager
async def open_futures(
    config: GatewayConfig,
    database: Database,
    *,
    trainer: Trainer | None,
    sampling: Sampling,
    quotas: Quotas,
    clock: Clock,
) -> AsyncIterator[tuple[Futures, list[Job]]]:
    """Yield futures, and the jobs that run and expire them; without a model service, pass None for `trainer`.

    Call `open_handles` before the jobs start, so that sampling futures can run. The next start of the gateway resumes
    unfinished futures.

    Raises:
        SystemExit: another gateway on the database stores payloads elsewhere; the message names the setting.
    """
    options, retry = config.futures, Retry()
    payloads = PayloadFiles(config.payload_folder())
    peers = await _open_peers(config, database, payloads)
    records = FutureRecords(SqlFutureStore(database), payloads, retry=retry, clock=clock)
    capacity = FutureCapacity(
        Bounds(per_tenant=options.waiting_per_tenant, total=options.waiting),
        sizes=Bounds(per_tenant=options.waiting_bytes_per_tenant, total=options.waiting_bytes),
        gate=sampling.gate,
    )
    training = {} if trainer is None else training_executors(trainer, records.store, retry)
    runner = Runner(
        records,
        capacity,
        {REFUSED_KIND: FailRefused(), **training},
        _limits(options, quotas),
        waiters=Waiters(),
        is_shared=peers is not None,
    )
    futures = Futures(runner, peers=peers, caller=current_caller)
    expiry = Expiry(records=records, results_for=options.results_for, records_for=options.records_for)
    try:
        async with _leased(config, peers, futures) as run:
            with measures.futures_waiting.observing(lambda: capacity.count):
                yield futures, [run, lambda: expiry.run(interval=options.sweep_interval)]
    finally:
        await futures.close()
        payloads.close()


def open_handles(
    database: Database, futures: Futures, *, sampling: Sampling, lookups: GrpcLookups, quotas: Quotas, clock: Clock
) -> SamplingHandles:
    """Return the sampling handles, and let `futures` sample from them."""
    store, tally = SqlHandleStore(database), SampleTally(quotas.meter)
    handles = SamplingHandles(store, lookups, futures.wait_for_result, caller=current_caller, clock=clock)
    sample = SamplePrompt(sampling.complete, handles, Retry(), on_result=tally.note)
    futures.add_executor(SAMPLE_KIND, sample, on_settled=tally.settled)
    return handles


def _limits(options: FuturesConfig, quotas: Quotas) -> RunnerLimits:
    return RunnerLimits(
        lanes=Bounds(per_tenant=options.lanes_per_tenant, total=options.lanes),
        unordered=Bounds(per_tenant=options.unordered_per_tenant, total=options.unordered),
        memory=_memory(options),
        unordered_memory=_memory(options),
        patience=options.gap,
        weight_of=quotas.table.weight_of,
        is_rate_limited=quotas.rates.is_over_rate,
    )


def _memory(options: FuturesConfig) -> ByteGate:
    return ByteGate(tenant_bytes=options.running_bytes_per_tenant, total_bytes=options.running_bytes, wait_seconds=None)


async def _open_peers(config: GatewayConfig, database: Database, payloads: PayloadFiles) -> SqlPeers | None:
    """Return the other gateways on the database; None for SQLite, which only one gateway can use."""
    url = config.database_address()
    if not url.startswith('postgresql'):
        return None
    lease = config.futures.lease
    return SqlPeers(
        database,
        url,
        payload_store_id=await payloads.store_id(),
        silence=lease * _SILENT_HEARTBEATS / _HEARTBEATS,
        lease=lease,
    )


@asynccontextmanager
async def _leased(config: GatewayConfig, peers: SqlPeers | None, futures: Futures) -> AsyncIterator[Job]:
    """Hold a lease for the duration of the block, and yield the job that renews it and resumes futures."""
    if peers is None:
        yield futures.resume
        return
    lease = GatewayLease(peers, futures, Retry(), heartbeat=config.futures.lease / _HEARTBEATS)
    try:
        await lease.join()
    except PayloadsNotShared as error:
        text = (
            f'futures.payload_dir: another gateway on this database stores payloads in a different folder than '
            f'{config.payload_folder()}; set the same folder for all gateways, such as a network mount'
        )
        raise SystemExit(f'{config.service}: {text}') from error
    try:
        yield lease.run
    finally:
        await futures.close()
        await lease.leave()
