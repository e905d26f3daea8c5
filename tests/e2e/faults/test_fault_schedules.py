"""The model service, or a process of its mesh, is killed behind a proxy that loses and repeats messages."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from e2e.faults.rounds import Environment, Oracle, RoundReport, open_environment, run_round, running_harness
from e2e.faults.schedule import KILL_POINTS, count_kills
from fixtures.faulty_cluster import ACTOR, NODE
from fixtures.faulty_mesh import LAUNCHER, MESH_PLANS, RankKill
from fixtures.faulty_service import Kill

pytestmark = pytest.mark.timeout(420)

SEEDS = range(1000, 1010)


@pytest.mark.slow
async def test_two_kills_do_not_change_results(tmp_path: Path, tiny_llama_dir: Path) -> None:
    """Responses and saved tensors are bitwise equal if the service is killed at one or both of two failpoints."""
    kills = [Kill(failpoint=point) for point in KILL_POINTS[:2]]
    async with (
        open_environment(tmp_path, tiny_llama_dir) as environment,
        running_harness(environment.model('undisturbed')) as undisturbed,
    ):
        report = await run_round(environment, Oracle(undisturbed), SEEDS[:2], kills)
    assert report.violations == {}
    assert report.deaths


@pytest.mark.slow
async def test_kills_at_every_failpoint_do_not_change_results(tmp_path: Path, tiny_llama_dir: Path) -> None:
    """Each failpoint and a signal kill the service, and results and tensors equal those of a run without faults."""
    # The counts are small, so that few seeds reach all failpoints. The command's schedules have larger counts.
    kills = [Kill(failpoint=point, count=1 + index % 3) for index, point in enumerate(KILL_POINTS)]
    halves = [(SEEDS[:5], kills[::2]), (SEEDS[5:], kills[1::2])]
    async with (
        open_environment(tmp_path, tiny_llama_dir) as environment,
        running_harness(environment.model('undisturbed')) as undisturbed,
    ):
        oracle = Oracle(undisturbed)
        reports = await asyncio.gather(*(run_round(environment, oracle, seeds, kills) for seeds, kills in halves))
    assert {seed: lines for report in reports for seed, lines in report.violations.items()} == {}
    assert [point for point, count in count_kills([k for r in reports for k in r.deaths]).items() if not count] == []


@pytest.mark.slow
@pytest.mark.parametrize('name', ['sharded', 'pipeline', 'tensor', 'rows'])
async def test_lost_processes_of_a_mesh_do_not_change_results(tmp_path: Path, tiny_llama_dir: Path, name: str) -> None:
    """Results equal those of a run without faults although a rank is killed, a rank is stopped and the launcher dies.

    The service uses the meshes of the plan in turn.
    """
    kills = [
        RankKill(target='1', count=9, death=signal.SIGKILL),
        RankKill(target='1', count=9, death=signal.SIGSTOP),
        RankKill(target=LAUNCHER, count=9, death=signal.SIGKILL),
    ]
    plan = MESH_PLANS[name]
    async with (
        open_environment(tmp_path, tiny_llama_dir) as environment,
        running_harness(environment.mesh('undisturbed', plan)) as undisturbed,
    ):
        report = await run_round(environment, Oracle(undisturbed), SEEDS[:5], kills, mesh=plan)
    assert report.violations == {}
    assert report.deaths == kills


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(os.geteuid() != 0, reason='network namespaces require root')
async def test_lost_nodes_of_a_ray_cluster_do_not_change_results(tmp_path: Path, tiny_llama_dir: Path) -> None:
    """Results equal those of a run without faults although a node, an actor and a rank of a Ray cluster are lost.

    After each fault, the service starts on the other node or on the same node.
    """
    kills = [
        RankKill(target=NODE, count=9, death=signal.SIGKILL),
        RankKill(target=ACTOR, count=9, death=signal.SIGKILL),
        RankKill(target='1', count=9, death=signal.SIGSTOP),
    ]
    plan = MESH_PLANS['ray']
    async with (
        open_environment(tmp_path, tiny_llama_dir, is_on_ray=True) as environment,
        running_harness(environment.mesh('undisturbed', plan)) as undisturbed,
    ):
        report = await run_round(environment, Oracle(undisturbed), SEEDS[:5], kills, mesh=plan)
    assert report.violations == {}
    assert report.deaths == kills


@pytest.mark.slow
async def test_lost_adapters_of_a_service_without_a_journal_are_reported(tmp_path: Path, tiny_llama_dir: Path) -> None:
    """The test setup detects losses: a service without a journal loses every adapter when it is killed."""
    async with (
        open_environment(tmp_path, tiny_llama_dir) as environment,
        running_harness(environment.model('undisturbed')) as undisturbed,
    ):
        report = await _run_without_journal(environment, Oracle(undisturbed))
    assert list(report.violations) == [SEEDS[0]]
    assert any('ADAPTER_NOT_FOUND' in line for line in report.violations[SEEDS[0]])


async def _run_without_journal(environment: Environment, oracle: Oracle) -> RoundReport:
    return await run_round(environment, oracle, SEEDS[:1], [Kill(count=8)], journal='none')
