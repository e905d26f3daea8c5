"""Unit tests of `initialize` and of the meshes that it accepts."""

import random

import pytest

import twinkle
from twinkle.infra import NotSupportedYet, runtime


def test_mesh_from_sizes_multiplies_its_axes() -> None:
    """The world size is the product of the axis sizes, and data is split along dp and fsdp."""
    mesh = twinkle.DeviceMesh.from_sizes(dp_size=2, fsdp_size=4)
    assert (mesh.world_size, mesh.data_world_size, mesh.axis_size('tp')) == (8, 8, 1)


def test_dp_takes_the_remaining_ranks() -> None:
    """A world size without dp_size is filled by data parallelism."""
    mesh = twinkle.DeviceMesh.from_sizes(world_size=8, tp_size=2)
    assert (mesh.axis_size('dp'), mesh.axis_size('tp')) == (4, 2)


@pytest.mark.parametrize('sizes', [{'dp_size': 0}, {'world_size': 3, 'dp_size': 2}, {'world_size': 3, 'tp_size': 2}])
def test_impossible_sizes_are_refused(sizes: dict[str, int]) -> None:
    """Sizes that do not form a mesh raise ValueError."""
    with pytest.raises(ValueError, match='size'):
        twinkle.DeviceMesh.from_sizes(**sizes)


def test_many_ranks_are_refused_without_side_effects() -> None:
    """A refused `initialize` call leaves the runtime settings unchanged."""
    before = runtime()
    with pytest.raises(NotSupportedYet):
        twinkle.initialize(global_device_mesh=twinkle.DeviceMesh.from_sizes(dp_size=2))
    with pytest.raises(NotSupportedYet):
        twinkle.initialize('ray')
    with pytest.raises(ValueError, match='lazy_collect'):
        twinkle.initialize(lazy_collect=True)
    assert runtime() is before


def test_initialize_sets_seed_and_runtime() -> None:
    """The same seed gives the same random numbers, and `runtime` returns the given settings."""
    mesh = twinkle.DeviceMesh.from_sizes(dp_size=1)
    twinkle.initialize(seed=7, global_device_mesh=mesh)
    first = random.random()
    twinkle.initialize(seed=7, global_device_mesh=mesh)
    assert random.random() == first
    assert runtime().device_mesh is mesh
    assert 'dp=1' in twinkle.get_device_placement()
