"""Runs the same plans with and without faults: kills, full disks and a faulty proxy. The results are compared."""

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from e2e.faults.observation import Observation, describe_result
from e2e.faults.schedule import full_disks_of, round_of
from e2e.faults.tenant import Tenant
from e2e.faults.workload import TENANTS, AdapterPlan, plan_adapters
from fixtures.checkpoint_service import ServiceProcess
from fixtures.fault_proxy import MANY_FAULTS, NO_FAULTS, FaultProxy, FaultRates, RepeatedRequest
from fixtures.faulty_cluster import FaultyCluster
from fixtures.faulty_mesh import FaultyMesh, MeshPlan, RankKill
from fixtures.faulty_service import FaultyCheckpoint, FaultyModel, Kill, ServiceFailed, free_port
from fixtures.ray_network import RayNetwork, ray_network
from twinkle.api.model.v1 import training_service_pb2

_ROUND_LIMIT_SECONDS = 600
"""Time limit for a round; a round that exceeds the limit hangs."""

BUSY = {'max_resident_adapters': 6, 'snapshot_operations': 6, 'idle_seconds': 0.5}
"""Settings with which the service constantly takes snapshots of adapters and parks adapters."""

Key = tuple[int, int]
"""A seed, and the index of one of its adapters."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Folder, base model and checkpoint service of the rounds."""

    folder: Path
    model_dir: Path
    checkpoint_address: str
    network: RayNetwork | None = None
    """Cluster for services on Ray."""

    def model(
        self, name: str, kills: Sequence[Kill] = (), full_disks: Sequence[int] = (), **settings: object
    ) -> FaultyModel:
        """Return a model service with a new state folder; `settings` are fields of its configuration."""
        return FaultyModel(self._new_folder(name), {**self._defaults(), **settings}, kills, full_disks)

    def mesh(self, name: str, plan: MeshPlan, kills: Sequence[RankKill] = (), **settings: object) -> FaultyMesh:
        """Return a model service of several processes with a new state folder. Without kills, it is not on Ray."""
        folder, settings = self._new_folder(name), {**self._defaults(), **settings}
        if plan.is_on_ray and kills:
            assert self.network is not None
            return FaultyCluster(state_dir=folder, settings=settings, kills=kills, plan=plan, network=self.network)
        return FaultyMesh(folder, settings, kills, plan)

    def _new_folder(self, name: str) -> Path:
        state_dir = self.folder / name
        state_dir.mkdir(parents=True)
        return state_dir

    def _defaults(self) -> dict[str, object]:
        return {
            'base_model': self.model_dir,
            'checkpoint_address': self.checkpoint_address,
            'thread_count': 1,
            'drain_seconds': 0,
            # The limit is small, so that batches are split and share passes. The split of a batch affects its result.
            'pass_tokens': 128,
        }


@dataclass
class RoundReport:
    """Results of a round."""

    violations: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    """Violations by seed; violations of the whole round are listed for every seed."""
    deaths: Sequence[Kill] = ()
    """Kills of the model service that have happened."""
    checkpoint_deaths: int = 0
    """Number of kills of the checkpoint service."""
    planned_kills: Sequence[Kill] = ()
    fault_count: int = 0
    operation_count: int = 0


@asynccontextmanager
async def open_environment(folder: Path, model_dir: Path, *, is_on_ray: bool = False) -> AsyncIterator[Environment]:
    """Start a checkpoint service and, with `is_on_ray`, a Ray cluster; yield the environment with their addresses."""
    (folder / 'checkpoint').mkdir()
    checkpoints = await ServiceProcess.start(folder / 'checkpoint', f'listen=127.0.0.1:{free_port()}')
    try:
        with ray_network(folder) if is_on_ray else nullcontext() as network:
            yield Environment(
                folder=folder, model_dir=model_dir, checkpoint_address=checkpoints.address, network=network
            )
    finally:
        await checkpoints.kill()


async def run_round(
    environment: Environment,
    oracle: 'Oracle',
    seeds: Sequence[int],
    kills: Sequence[Kill] | Sequence[RankKill],
    *,
    mesh: MeshPlan | None = None,
    **settings: object,
) -> RoundReport:
    """Run the plans of some seeds with kills, and compare the observations with those of the run without faults.

    Args:
        environment: Environment of the round.
        oracle: The run without faults.
        seeds: Seeds of the plans; the first one is also the seed of the proxy.
        kills: Kills of the model service, in order.
        mesh: Plan of a service of several processes, whose kills are `RankKill`; None for a single process.
        settings: Fields of the service's configuration, in addition to `BUSY`.
    """
    plans = plans_of(seeds, environment)
    checkpoints = FaultyCheckpoint(environment.folder / f'checkpoint-{seeds[0]}', **_checkpoint_faults(seeds[0]))
    address = await checkpoints.start()
    settings = {**BUSY, 'checkpoint_address': address, **settings}
    name = f'round-{seeds[0]}'
    if mesh is None:
        model = environment.model(name, kills, full_disks_of(round_of(seeds[0])), **settings)
    else:
        model = environment.mesh(name, mesh, [kill for kill in kills if isinstance(kill, RankKill)], **settings)
    report = RoundReport(planned_kills=kills, operation_count=sum(plan.operation_count for plan in plans.values()))
    undisturbed = asyncio.create_task(oracle.observe(plans))
    try:
        async with (
            asyncio.timeout(_ROUND_LIMIT_SECONDS),
            running_harness(model, seed=seeds[0], rates=MANY_FAULTS) as harness,
        ):
            harness.proxy.on_response.append(checkpoints.count_response)
            observed = await harness.run_plans(plans)
            _add_to_all(report, seeds, await harness.check_adapters())
            report.fault_count = harness.proxy.fault_count
        _compare(report, observed, await undisturbed)
    except TimeoutError:
        _add_to_all(report, seeds, [f'the round hangs:\n{model.log_tail()}'])
    except ServiceFailed as error:
        _add_to_all(report, seeds, [str(error)])
    finally:
        undisturbed.cancel()
        await checkpoints.stop()
    report.deaths, report.checkpoint_deaths = model.deaths, checkpoints.death_count
    return report


def _checkpoint_faults(seed: int) -> dict[str, int]:
    """Return the numbers of responses after which the checkpoint service is killed and its disk is full."""
    rng = random.Random(seed)
    return {'count': rng.randint(20, 120), 'full_disk': rng.randint(20, 200)}


def _compare(report: RoundReport, observed: Mapping[Key, Observation], expected: Mapping[Key, Observation]) -> None:
    for (seed, index), observation in observed.items():
        lines = observation.differences(expected[seed, index])
        if lines:
            report.violations.setdefault(seed, []).extend(f'adapter {index}: {line}' for line in lines)


def plans_of(seeds: Sequence[int], environment: Environment) -> dict[Key, AdapterPlan]:
    """Return the plans of all adapters of some seeds."""
    return {
        (seed, index): plan
        for seed in seeds
        for index, plan in enumerate(plan_adapters(seed, str(environment.model_dir)))
    }


class Oracle:
    """The run without faults; its observations are cached.

    Args:
        harness: Harness without faults.
    """

    def __init__(self, harness: 'Harness') -> None:
        self._harness = harness
        self._observations: dict[Key, Observation] = {}
        self._lock = asyncio.Lock()

    async def observe(self, plans: Mapping[Key, AdapterPlan]) -> dict[Key, Observation]:
        """Run the plans one after the other, and return their observations."""
        async with self._lock:
            for key, plan in plans.items():
                if key not in self._observations:
                    self._observations.update(await self._harness.run_plans({key: plan}))
            await self._harness.delete_all()
        return {key: self._observations[key] for key in plans}


class Harness:
    """A model service behind a proxy, and its tenants.

    Args:
        proxy: Proxy in front of the service.
        tenants: Tenants by name.
        service: Task that runs the service; it ends early only if the service fails.
    """

    def __init__(self, proxy: FaultProxy, tenants: Mapping[str, Tenant], service: asyncio.Task[None]) -> None:
        self.proxy = proxy
        self._tenants = tenants
        self._service = service
        self._created: dict[str, list[str]] = {name: [] for name in tenants}

    async def run_plans(self, plans: Mapping[Key, AdapterPlan]) -> dict[Key, Observation]:
        """Run all plans at the same time, and return their observations.

        Raises:
            ServiceFailed: The service exited for a reason other than a planned kill.
        """
        runs = [self._tenants[plan.tenant].run_plan(plan) for plan in plans.values()]
        work = asyncio.ensure_future(asyncio.gather(*runs))
        await asyncio.wait([work, self._service], return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await self._service
        for plan, (adapter_id, _) in zip(plans.values(), work.result(), strict=True):
            self._created[plan.tenant] += filter(None, [adapter_id])
        return {key: observation for key, (_, observation) in zip(plans, work.result(), strict=True)}

    async def check_adapters(self) -> list[str]:
        """Delete all adapters; return the violations other than differences from the run without faults.

        These violations are different responses to a repeated request, and missing or unexpected adapters.
        """
        lines = [line for line in map(_contradiction, self.proxy.repeated_requests) if line]
        for name, tenant in self._tenants.items():
            if await tenant.adapter_ids() != sorted(self._created[name]):
                lines.append(f'{name} does not have exactly the adapters that it created')
        await self.delete_all()
        for name, tenant in self._tenants.items():
            if await tenant.adapter_ids():
                lines.append(f'{name} still has adapters after deleting all of them')
        return lines

    async def delete_all(self) -> None:
        """Delete all adapters that the tenants created."""
        for name, tenant in self._tenants.items():
            for adapter_id in self._created[name]:
                await tenant.delete(adapter_id)
            self._created[name].clear()


@asynccontextmanager
async def running_harness(
    model: FaultyModel | FaultyMesh, *, seed: int = 0, rates: FaultRates = NO_FAULTS
) -> AsyncIterator[Harness]:
    """Run a model service, and yield its harness; the service, the proxy and the tenants are stopped at the end."""
    proxy = FaultProxy(model.address, seed=seed, rates=rates)
    proxy.on_response.append(model.count_response)
    address = await proxy.start()
    service = asyncio.create_task(model.run())
    tenants = {name: Tenant(name, address) for name in TENANTS}
    try:
        yield Harness(proxy, tenants, service)
    finally:
        for tenant in tenants.values():
            await asyncio.to_thread(tenant.close)
        await proxy.stop()
        await model.stop()
        await asyncio.wait([service])


def _contradiction(repeated: RepeatedRequest) -> str:
    """Return the difference between the two responses to a repeated Execute request; empty if they are equal.

    For other requests, the result is always empty.
    """
    if not repeated.method.endswith('/Execute'):
        return ''
    operation = training_service_pb2.ExecuteRequest.FromString(repeated.request).operation
    name = operation.WhichOneof('verb') or ''
    first, second = (
        describe_result(name, training_service_pb2.ExecuteResponse.FromString(response).result)
        for response in (repeated.first, repeated.second)
    )
    return '' if first == second else f'operation {operation.sequence_number} returned {first}, then {second}'


def _add_to_all(report: RoundReport, seeds: Sequence[int], lines: Sequence[str]) -> None:
    for seed in seeds if lines else ():
        report.violations.setdefault(seed, []).extend(lines)
