"""A round: the same plans, once undisturbed and once with kills and a rough proxy, and what differs."""

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from e2e.faults.observation import Observation, describe_result
from e2e.faults.tenant import Tenant
from e2e.faults.workload import TENANTS, AdapterPlan, plan_adapters
from fixtures.checkpoint_service import ServiceProcess
from fixtures.fault_proxy import ROUGH, UNDISTURBED, AnsweredTwice, FaultProxy, FaultRates
from fixtures.faulty_service import FaultyCheckpoint, FaultyModel, Kill, ServiceFailed, free_port
from twinkle.api.model.v1 import training_service_pb2

_ROUND_LIMIT_SECONDS = 600
"""A round that takes longer hangs."""

BUSY = {'max_resident_adapters': 6, 'snapshot_operations': 6, 'idle_seconds': 0.5}
"""Adapters are snapshotted and paged all the time."""

Key = tuple[int, int]
"""A seed, and the index of one of its adapters."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where rounds take place."""

    folder: Path
    model_dir: Path
    checkpoint_address: str

    def model(self, name: str, kills: Sequence[Kill] = (), **settings: object) -> FaultyModel:
        """Return a model service with a state folder of its own; `settings` are of its configuration."""
        state_dir = self.folder / name
        state_dir.mkdir(parents=True)
        always = {
            'base_model': self.model_dir,
            'checkpoint_address': self.checkpoint_address,
            'thread_count': 1,
            'drain_seconds': 0,
            # Small, so that batches are split and passes shared; how a batch is split is part of its result.
            'pass_tokens': 128,
        }
        return FaultyModel(state_dir, {**always, **settings}, kills)


@dataclass
class RoundReport:
    """What came of a round."""

    violations: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    """By seed; those that belong to no seed alone are under each."""
    deaths: Sequence[Kill] = ()
    checkpoint_deaths: int = 0
    planned_kills: Sequence[Kill] = ()
    fault_count: int = 0
    operation_count: int = 0


@asynccontextmanager
async def setting_in(folder: Path, model_dir: Path) -> AsyncIterator[Setting]:
    """Yield a setting with a checkpoint service as a process of its own."""
    (folder / 'checkpoint').mkdir()
    checkpoints = await ServiceProcess.start(folder / 'checkpoint', f'listen=127.0.0.1:{free_port()}')
    try:
        yield Setting(folder=folder, model_dir=model_dir, checkpoint_address=checkpoints.address)
    finally:
        await checkpoints.kill()


async def run_round(
    setting: Setting, oracle: 'Oracle', seeds: Sequence[int], kills: Sequence[Kill], **settings: object
) -> RoundReport:
    """Carry out the plans of some seeds with these kills, and compare with the undisturbed run.

    Args:
        setting: where.
        oracle: the undisturbed run.
        seeds: of the plans; the first is the proxy's.
        kills: of the processes of the service, in their order.
        settings: fields of the service's configuration, other than `BUSY`.
    """
    plans = plans_of(seeds, setting)
    checkpoints = FaultyCheckpoint(setting.folder / f'checkpoint-{seeds[0]}', count=_checkpoint_answers(seeds[0]))
    address = await checkpoints.start()
    model = setting.model(f'round-{seeds[0]}', kills, **{**BUSY, 'checkpoint_address': address, **settings})
    report = RoundReport(planned_kills=kills, operation_count=sum(plan.operation_count for plan in plans.values()))
    expecting = asyncio.create_task(oracle.observe(plans))
    try:
        async with asyncio.timeout(_ROUND_LIMIT_SECONDS), serving(model, seed=seeds[0], rates=ROUGH) as stand:
            stand.proxy.on_answer.append(checkpoints.note_response)
            observed = await stand.carry_out(plans)
            _note_everywhere(report, seeds, await stand.lasting_faults())
        _compare(report, observed, await expecting)
    except TimeoutError:
        _note_everywhere(report, seeds, [f'hangs:\n{model.log_tail()}'])
    except ServiceFailed as error:
        _note_everywhere(report, seeds, [str(error)])
    finally:
        expecting.cancel()
        await checkpoints.stop()
    report.deaths, report.checkpoint_deaths = model.deaths, checkpoints.death_count
    report.fault_count = stand.proxy.fault_count
    return report


def _checkpoint_answers(seed: int) -> int:
    """Return after how many answers of a round its checkpoint service is killed."""
    return random.Random(seed).randint(20, 120)


def _compare(report: RoundReport, observed: Mapping[Key, Observation], expected: Mapping[Key, Observation]) -> None:
    for (seed, index), seen in observed.items():
        lines = seen.differences(expected[seed, index])
        if lines:
            report.violations.setdefault(seed, []).extend(f'adapter {index}: {line}' for line in lines)


def plans_of(seeds: Sequence[int], setting: Setting) -> dict[Key, AdapterPlan]:
    """Return the plans of some seeds."""
    return {
        (seed, index): plan for seed in seeds for index, plan in enumerate(plan_adapters(seed, str(setting.model_dir)))
    }


class Oracle:
    """The undisturbed run, of one service that nobody kills; what it saw is kept by seed."""

    def __init__(self, stand: 'Stand') -> None:
        """Use a stand of its own."""
        self._stand = stand
        self._seen: dict[Key, Observation] = {}
        self._alone = asyncio.Lock()

    async def observe(self, plans: Mapping[Key, AdapterPlan]) -> dict[Key, Observation]:
        """Carry out the plans, one adapter after the other, each alone."""
        async with self._alone:
            for key, plan in plans.items():
                if key not in self._seen:
                    self._seen.update(await self._stand.carry_out({key: plan}))
            await self._stand.delete_all()
        return {key: self._seen[key] for key in plans}


class Stand:
    """A model service behind a proxy, and its tenants."""

    def __init__(self, proxy: FaultProxy, tenants: Mapping[str, Tenant], running: asyncio.Task[None]) -> None:
        """Put the parts together; `running` ends only by a failure of the service."""
        self.proxy = proxy
        self._tenants = tenants
        self._running = running
        self._made: dict[str, list[str]] = {name: [] for name in tenants}

    async def carry_out(self, plans: Mapping[Key, AdapterPlan]) -> dict[Key, Observation]:
        """Carry out the plans, all at once.

        Raises:
            ServiceFailed: the service ended by itself.
        """
        lives = [self._tenants[plan.tenant].carry_out(plan) for plan in plans.values()]
        work = asyncio.ensure_future(asyncio.gather(*lives))
        await asyncio.wait([work, self._running], return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await self._running
        for plan, (adapter_id, _) in zip(plans.values(), work.result(), strict=True):
            self._made[plan.tenant] += filter(None, [adapter_id])
        return {key: seen for key, (_, seen) in zip(plans, work.result(), strict=True)}

    async def lasting_faults(self) -> list[str]:
        """Return what is wrong beyond a single adapter: adapters made twice, requests answered in two ways."""
        found = [line for line in map(_contradiction, self.proxy.answered_twice) if line]
        for name, tenant in self._tenants.items():
            if await tenant.adapter_ids() != sorted(self._made[name]):
                found.append(f'{name} has other adapters than were created')
        await self.delete_all()
        for name, tenant in self._tenants.items():
            if await tenant.adapter_ids():
                found.append(f'{name} has adapters left after deleting all')
        return found

    async def delete_all(self) -> None:
        """Delete every adapter that was made."""
        for name, tenant in self._tenants.items():
            for adapter_id in self._made[name]:
                await tenant.delete(adapter_id)
            self._made[name].clear()


@asynccontextmanager
async def serving(model: FaultyModel, *, seed: int = 0, rates: FaultRates = UNDISTURBED) -> AsyncIterator[Stand]:
    """Yield a stand around a model service; everything is ended at the end."""
    proxy = FaultProxy(model.address, seed=seed, rates=rates)
    proxy.on_answer.append(model.note_response)
    address = await proxy.start()
    running = asyncio.create_task(model.run())
    tenants = {name: Tenant(name, address) for name in TENANTS}
    try:
        yield Stand(proxy, tenants, running)
    finally:
        for tenant in tenants.values():
            await asyncio.to_thread(tenant.close)
        await proxy.stop()
        await model.stop()
        await asyncio.wait([running])


def _contradiction(twice: AnsweredTwice) -> str:
    """Return what two answers to the same request disagree in; empty where they agree."""
    if not twice.method.endswith('/Execute'):
        return ''
    operation = training_service_pb2.ExecuteRequest.FromString(twice.request).operation
    name = operation.WhichOneof('verb') or ''
    first, second = (
        describe_result(name, training_service_pb2.ExecuteResponse.FromString(answer).result)
        for answer in (twice.first, twice.second)
    )
    return '' if first == second else f'operation {operation.sequence_number} answered {first}, then {second}'


def _note_everywhere(report: RoundReport, seeds: Sequence[int], lines: Sequence[str]) -> None:
    for seed in seeds if lines else ():
        report.violations.setdefault(seed, []).extend(lines)
