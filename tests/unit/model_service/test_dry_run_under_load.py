"""Estimates whose measurement was disturbed by other processes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from fixtures.tiny_model import build_tiny_model
from twinkle.data_format import LoraConfig
from twinkle.model.dry_run import CostModel
from twinkle.model.dry_run.cost_model import Coefficients
from twinkle.nn import PackedCausalLM
from twinkle_services.kit.clock import FakeClock
from twinkle_services.model.backends.dry_run import EngineDryRun
from twinkle_services.model.domain.plan import TrainingPlan
from twinkle_services.model.domain.training_config import Component

PLAN = TrainingPlan(
    lora_config=LoraConfig(r=1),
    optimizer=Component(name='SGD', options={'lr': 0.1}),
    batch_size=1,
    sequence_tokens=8,
)


@dataclass
class FakeGroup:
    """Processes that measure the engine in two steps each time."""

    other_loads: list[float]
    """Share of other processes in each measurement."""
    count: int = 0
    """Number of measurements."""
    steps: list[CostModel | None] = field(default_factory=list)

    async def call(self, method: Callable[..., Any]) -> CostModel | None:
        """Return the cost model in every second call."""
        if not self.steps:
            free = Coefficients({}, 0.0)
            model = CostModel(
                time=free,
                memory=free,
                memory_by_parameter=0.0,
                step_seconds_by_parameter=0.0,
                max_pass_tokens=8,
                other_load=self.other_loads[self.count],
            )
            self.count += 1
            self.steps = [None, model]
        assert method.__name__ == 'measure'
        return self.steps.pop(0)


def dry_run(group: Any, folder: Path, clock: FakeClock, **options: Any) -> EngineDryRun:
    """Return an estimator of the tiny model."""
    return EngineDryRun(group, PackedCausalLM.load(build_tiny_model(folder)), clock=clock, **options)


async def test_measurement_under_load_is_repeated_after_a_minute(tmp_path: Path) -> None:
    """A busy machine is reported, and measured again by the first estimate after a minute until it is idle."""
    group, clock = FakeGroup([0.5, 0.05]), FakeClock()
    estimator = dry_run(group, tmp_path, clock)
    assert (await estimator.estimate(PLAN)).is_measured_under_load
    clock.advance(timedelta(seconds=59))
    assert (await estimator.estimate(PLAN)).is_measured_under_load
    assert group.count == 1
    clock.advance(timedelta(seconds=1))
    assert not (await estimator.estimate(PLAN)).is_measured_under_load
    clock.advance(timedelta(hours=1))
    assert not (await estimator.estimate(PLAN)).is_measured_under_load
    assert group.count == 2


@pytest.mark.parametrize('process_count', [1, 2])
async def test_processes_of_the_group_are_no_other_load(tmp_path: Path, process_count: int) -> None:
    """The load is reported only for a single process, because those of a group would count as other load."""
    estimator = dry_run(FakeGroup([1.0]), tmp_path, FakeClock(), process_count=process_count)
    assert (await estimator.estimate(PLAN)).is_measured_under_load is (process_count == 1)
