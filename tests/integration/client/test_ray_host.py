"""Stacks that cannot run on a Ray cluster. `tests/e2e/test_ray_stack.py` runs a stack on a cluster."""

from pathlib import Path
from typing import Any

import pytest

from twinkle_client.stack import StackError, StackOptions, StackState, start_stack


@pytest.mark.parametrize(
    ('resources', 'problem'),
    [
        ({'gateway': {'CPU': 1}}, r'resources\.gateway: only model and sampler are placed by resources'),
        ({'model': {'GPU': 0}}, r'resources\.model\.GPU: must be a positive number, got 0'),
        ({'sampler': {'GPU': True}}, r'resources\.sampler\.GPU: must be a positive number, got True'),
        ({'sampler': {}}, r'resources\.sampler: must name at least one resource'),
        ({'sampler': 1}, r'resources\.sampler: must be a mapping such as \{GPU: 1\}, got 1'),
    ],
)
def test_invalid_resources_are_refused(tmp_path: Path, resources: Any, problem: str) -> None:
    """The error for invalid resources names the field and states the rule."""
    with pytest.raises(ValueError, match=problem):
        StackOptions(state_dir=tmp_path, resources=resources)


@pytest.mark.parametrize('address', ['127.0.0.1:1', 'somewhere', '127.0.0.1:port'])
def test_missing_cluster_is_reported_before_anything_starts(tmp_path: Path, address: str) -> None:
    """The error for a missing cluster names its address and the command that starts a cluster; no stack is recorded."""
    with pytest.raises(StackError, match=f'no Ray cluster at {address}; start one with `ray start --head`'):
        start_stack(StackOptions(state_dir=tmp_path, ray_address=address), report=lambda *_: None)
    assert StackState.load(tmp_path) is None


def test_resources_without_a_cluster_are_refused(tmp_path: Path) -> None:
    """A stack on this machine refuses resources, because only a cluster can reserve resources."""
    options = StackOptions(state_dir=tmp_path, resources={'sampler': {'GPU': 1}})
    with pytest.raises(StackError, match='resources: only a Ray cluster reserves them'):
        start_stack(options, report=lambda *_: None)
