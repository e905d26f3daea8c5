"""The rule that changes the number of samplers, and its options."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from twinkle.api.sampler.v1.engine_pb2 import EngineLoad
from twinkle_client.stack import StackOptions
from twinkle_client.stack.scaling_rule import Scaling, ScalingRule

IDLE = EngineLoad(max_sequence_count=8)
HALF = EngineLoad(running_sequence_count=4, max_sequence_count=8)
FULL = EngineLoad(running_sequence_count=8, max_sequence_count=8)
QUEUED = EngineLoad(running_sequence_count=8, waiting_sequence_count=1, max_sequence_count=8)
UNKNOWN = EngineLoad(running_sequence_count=1)
FEW = EngineLoad(running_sequence_count=1, max_sequence_count=8)
FEW_QUEUED = EngineLoad(running_sequence_count=1, waiting_sequence_count=1, max_sequence_count=8)
"""A sampler that has a queue although slots are free, because its key-value cache is full."""
FEW_LONG = EngineLoad(running_sequence_count=1, max_sequence_count=8, kv_usage=0.6)
SCALING = Scaling(max_samplers=4, grow_seconds=10, shrink_seconds=60)


def _decisions(observed: Sequence[tuple[float, Sequence[EngineLoad]]]) -> list[int]:
    rule = ScalingRule(SCALING)
    return [rule.decide(loads, now) for now, loads in observed]


@pytest.mark.parametrize(
    ('loads', 'seconds', 'change'),
    [
        ([QUEUED, QUEUED], 10, 1),
        ([QUEUED, QUEUED], 9, 0),
        ([QUEUED, FULL], 100, 0),
        ([FULL], 100, 0),
        ([], 1000, 0),
        ([IDLE], 1000, 0),
        ([IDLE, IDLE], 60, -1),
        ([IDLE, IDLE], 59, 0),
        ([IDLE, HALF], 60, -1),
        ([HALF, HALF], 60, 0),
        ([HALF, HALF, IDLE], 60, -1),
        ([UNKNOWN, UNKNOWN], 60, 0),
        ([FEW_QUEUED, FEW], 100, 0),
        ([FEW, FEW], 60, -1),
        ([FEW_LONG, FEW_LONG], 100, 0),
    ],
)
def test_number_changes_after_a_constant_load(loads: Sequence[EngineLoad], seconds: float, change: int) -> None:
    """A sampler is added if every sampler has a queue, and removed if half of the others' capacity is sufficient."""
    assert _decisions([(5.0, loads), (5.0 + seconds, loads)]) == [0, change]


def test_measured_time_starts_again_after_a_change() -> None:
    """The measured time starts again after a moment without a queue, and after each added sampler."""
    observed = [
        (0, [QUEUED]),
        (9, [FULL]),
        (10, [QUEUED]),
        (19, [QUEUED]),
        (20, [QUEUED]),
        (21, [QUEUED]),
        (31, [QUEUED]),
    ]
    assert _decisions(observed) == [0, 0, 0, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ('section', 'problem'),
    [
        ('{max_sampler: 3}', r'autoscaling\.max_sampler: unknown field; did you mean max_samplers\?'),
        ('{}', r'autoscaling\.max_samplers: must be set'),
        ('{max_samplers: 1}', r'autoscaling\.max_samplers: must be at least sampler_count, which is 2, got 1'),
        ('{max_samplers: 2.5}', r'autoscaling\.max_samplers: must be a number, got 2\.5'),
        ('{max_samplers: true}', r'autoscaling\.max_samplers: must be a number, got True'),
        ('{max_samplers: 4, grow_seconds: 0}', r'autoscaling\.grow_seconds: must be positive, got 0'),
        ('{max_samplers: 4, shrink_seconds: .inf}', r'autoscaling\.shrink_seconds: must be positive, got inf'),
        ('{max_samplers: 4, shrink_seconds: long}', r"autoscaling\.shrink_seconds: must be a number, got 'long'"),
        ('3', 'autoscaling must be a mapping, got 3'),
    ],
)
def test_invalid_section_is_refused(tmp_path: Path, section: str, problem: str) -> None:
    """The error for an invalid section names the field."""
    (tmp_path / 'stack.yaml').write_text(f'sampler_count: 2\nautoscaling: {section}\n')
    with pytest.raises(ValueError, match=problem):
        StackOptions(state_dir=tmp_path).with_file(tmp_path / 'stack.yaml')


def test_section_is_read(tmp_path: Path) -> None:
    """The fields of the section are those of `Scaling`, with its defaults."""
    (tmp_path / 'stack.yaml').write_text('autoscaling: {max_samplers: 3, grow_seconds: 2}\n')
    options = StackOptions(state_dir=tmp_path).with_file(tmp_path / 'stack.yaml')
    assert options.autoscaling == Scaling(max_samplers=3, grow_seconds=2)


def test_stack_without_samplers_cannot_grow(tmp_path: Path) -> None:
    """A stack that starts without samplers refuses autoscaling, because it has no queue to measure."""
    fields: dict[str, Any] = {'state_dir': tmp_path, 'sampler_count': 0, 'autoscaling': SCALING}
    with pytest.raises(ValueError, match='sampler_count must be at least 1'):
        StackOptions(**fields)
