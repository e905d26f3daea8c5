"""The model service killed at every failpoint, behind a proxy that loses and doubles what passes."""

import asyncio
from pathlib import Path

import pytest

from e2e.faults.rounds import Oracle, RoundReport, Setting, run_round, serving, setting_in
from e2e.faults.schedule import PLACES, covered
from fixtures.faulty_service import Kill

pytestmark = pytest.mark.timeout(420)

SEEDS = range(1000, 1010)


async def test_two_kills_change_nothing(tmp_path: Path, tiny_llama_dir: Path) -> None:
    """A service killed at two failpoints gives the answers and the saved bits of an undisturbed run."""
    kills = [Kill(failpoint=place) for place in PLACES[:2]]
    async with setting_in(tmp_path, tiny_llama_dir) as setting, serving(setting.model('undisturbed')) as undisturbed:
        report = await run_round(setting, Oracle(undisturbed), SEEDS[:2], kills)
    assert report.violations == {}
    assert report.deaths


@pytest.mark.slow
async def test_kills_at_every_failpoint_change_nothing(tmp_path: Path, tiny_llama_dir: Path) -> None:
    """Each failpoint and a signal kill the service once; all answers and saved bits equal an undisturbed run's."""
    # Early, so that few seeds come to all of them: the command's schedules spread them out.
    kills = [Kill(failpoint=place, count=1 + index % 3) for index, place in enumerate(PLACES)]
    halves = [(SEEDS[:5], kills[::2]), (SEEDS[5:], kills[1::2])]
    async with setting_in(tmp_path, tiny_llama_dir) as setting, serving(setting.model('undisturbed')) as undisturbed:
        oracle = Oracle(undisturbed)
        reports = await asyncio.gather(*(run_round(setting, oracle, seeds, kills) for seeds, kills in halves))
    assert {seed: lines for report in reports for seed, lines in report.violations.items()} == {}
    assert [place for place, count in covered([k for r in reports for k in r.deaths]).items() if not count] == []


async def test_harness_sees_what_a_kill_loses_without_a_journal(tmp_path: Path, tiny_llama_dir: Path) -> None:
    """The harness can fail: a service that keeps no journal loses every adapter when it is killed."""
    async with setting_in(tmp_path, tiny_llama_dir) as setting, serving(setting.model('undisturbed')) as undisturbed:
        report = await _round_without_journal(setting, Oracle(undisturbed))
    assert list(report.violations) == [SEEDS[0]]
    assert any('ADAPTER_NOT_FOUND' in line for line in report.violations[SEEDS[0]])


async def _round_without_journal(setting: Setting, oracle: Oracle) -> RoundReport:
    return await run_round(setting, oracle, SEEDS[:1], [Kill(count=8)], journal='none')
