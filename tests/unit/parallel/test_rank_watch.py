"""Tests that lost processes are detected: a rank is reported if its heartbeats stop before it is closed."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from torch.distributed import HashStore, Store  # pyright: ignore[reportPrivateImportUsage]

from twinkle.parallel import RankWatch

SILENCE_SECONDS = 0.25
"""Time without heartbeats after which a rank counts as lost."""
LIMIT_SECONDS = 20.0
"""Maximum time that a test waits for a report."""


class Reports:
    """Lost processes that a watch has reported."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.reported = threading.Event()

    def __call__(self, problem: str) -> None:
        self.problems.append(problem)
        self.reported.set()


class LostStore(Store):
    """Store whose host process has ended."""

    def set(self, key: str, value: str) -> None:
        """Raise RuntimeError."""
        raise RuntimeError(f'cannot set {key}')


@dataclass
class FakeClock:
    """Clock that a test advances."""

    seconds: float = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.seconds


@pytest.fixture
def watch() -> Iterator[Callable[[Store, int, Reports], RankWatch]]:
    """A function that starts a watch for one of two ranks. The fixture closes all watches after the test."""
    started: list[RankWatch] = []

    def start(store: Store, rank: int, reports: Reports) -> RankWatch:
        started.append(RankWatch(store, rank=rank, size=2, silence_seconds=SILENCE_SECONDS, on_lost=reports))
        started[-1].start()
        return started[-1]

    yield start
    for one in started:
        one.close()


def test_a_rank_without_heartbeats_is_reported_once(watch: Callable[[Store, int, Reports], RankWatch]) -> None:
    """A rank whose heartbeats stop is reported once by its number."""
    reports = Reports()
    watch(HashStore(), 0, reports)
    assert reports.reported.wait(LIMIT_SECONDS)
    assert [problem.partition(' has')[0] for problem in reports.problems] == ['rank 1']


def test_running_and_closed_ranks_are_not_reported(
    watch: Callable[[Store, int, Reports], RankWatch],
) -> None:
    """Neither a rank with heartbeats nor a closed rank is reported, even after several times the limit."""
    store, reports = HashStore(), Reports()
    watch(store, 0, reports)
    other = watch(store, 1, reports)
    assert not reports.reported.wait(4 * SILENCE_SECONDS)
    other.close()
    assert not reports.reported.wait(4 * SILENCE_SECONDS)


def test_a_lost_store_is_reported(watch: Callable[[Store, int, Reports], RankWatch]) -> None:
    """A failing store is reported as a lost launcher, because the launcher hosts the store."""
    reports = Reports()
    watch(LostStore(), 0, reports)
    assert reports.reported.wait(LIMIT_SECONDS)
    assert 'launcher' in reports.problems[0]


def test_a_pause_of_all_ranks_is_not_reported() -> None:
    """No rank is reported if all pause for longer than the limit, but a rank that does not resume is."""
    store, clock, reports = HashStore(), FakeClock(), Reports()
    first, second = (
        RankWatch(store, rank=rank, size=2, silence_seconds=5.0, on_lost=reports, clock=clock) for rank in (0, 1)
    )
    for _ in range(3):
        clock.seconds += 1.0
        assert (first.check(), second.check(), first.check()) == ('', '', '')
    clock.seconds += 60.0
    assert (first.check(), second.check(), first.check()) == ('', '', '')
    problems: list[str] = []
    for _ in range(7):
        clock.seconds += 1.0
        problems.append(first.check())
    assert problems == [*[''] * 5, 'rank 1 has not responded for 6 s', 'rank 1 has not responded for 7 s']
