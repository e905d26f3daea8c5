"""Unit tests of `initialize` and of the meshes that it accepts."""

import random
from typing import Any

import pytest

import twinkle
from twinkle.infra import NotSupportedYet, runtime
from twinkle.infra.launcher import check_mesh
from twinkle.model import TransformersModel


def test_mesh_from_sizes_multiplies_its_axes() -> None:
    """The world size is the product of the axis sizes, and data is split along dp and fsdp."""
    mesh = twinkle.DeviceMesh.from_sizes(dp_size=2, fsdp_size=4)
    assert (mesh.world_size, mesh.data_world_size, mesh.axis_size('tp')) == (8, 8, 1)


def test_dp_takes_the_remaining_ranks() -> None:
    """If dp_size is unset, the axis dp gets the ranks that the other axes leave."""
    mesh = twinkle.DeviceMesh.from_sizes(world_size=8, tp_size=2)
    assert (mesh.axis_size('dp'), mesh.axis_size('tp')) == (4, 2)


@pytest.mark.parametrize('sizes', [{'dp_size': 0}, {'world_size': 3, 'dp_size': 2}, {'world_size': 3, 'tp_size': 2}])
def test_impossible_sizes_are_refused(sizes: dict[str, int]) -> None:
    """Sizes that do not form a mesh raise ValueError."""
    with pytest.raises(ValueError, match='size'):
        twinkle.DeviceMesh.from_sizes(**sizes)


@pytest.mark.parametrize(
    ('sizes', 'error', 'message'),
    [
        ({'dp_size': 2}, ValueError, 'torchrun --nproc_per_node=2'),
        ({'fsdp_size': 4, 'dp_size': 2}, ValueError, 'dp=2 x fsdp=4'),
        ({'pp_size': 2, 'tp_size': 2}, ValueError, 'pp=2 x tp=2'),
        ({'ulysses_size': 2}, ValueError, 'ulysses=2'),
        ({'cp_size': 2}, NotSupportedYet, 'cp_size'),
        ({'fsdp_size': 2, 'tp_size': 2}, NotSupportedYet, 'fsdp_size does not compose'),
        ({'ulysses_size': 2, 'pp_size': 2}, NotSupportedYet, 'ulysses_size does not compose'),
        ({'ep_size': 2, 'dp_size': 2}, NotSupportedYet, 'ep_size must be equal to tp_size'),
        ({'ep_size': 2, 'tp_size': 4}, NotSupportedYet, 'ep_size must be equal to tp_size'),
        ({'ep_size': 2, 'tp_size': 2}, ValueError, 'torchrun --nproc_per_node=2'),
        ({'vpp_size': 2}, NotSupportedYet, 'vpp_size'),
        ({'sequence_parallel': True}, NotSupportedYet, 'sequence_parallel needs tp_size'),
    ],
)
def test_unsuitable_meshes_are_refused(sizes: dict[str, Any], error: type[Exception], message: str) -> None:
    """A mesh with more ranks than processes, or with an unsupported option, is refused before a model is loaded."""
    before, mesh = runtime(), twinkle.DeviceMesh.from_sizes(**sizes)
    with pytest.raises(error, match=message):
        twinkle.initialize(global_device_mesh=mesh)
    with pytest.raises(error, match=message):
        TransformersModel('never-loaded', device_mesh=mesh)
    assert runtime() is before


def test_refused_calls_change_nothing() -> None:
    """A refused `initialize` call leaves the runtime settings unchanged."""
    before = runtime()
    with pytest.raises(ValueError, match='groups'):
        twinkle.initialize('ray')
    with pytest.raises(NotSupportedYet, match='notifier'):
        twinkle.initialize('ray', groups=[twinkle.DeviceGroup('g', 1)], notifier=print)
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


@pytest.mark.parametrize(
    ('world_size', 'mesh', 'message'),
    [
        ('2', None, 'RANK is not set'),
        (' 2 ', None, 'RANK is not set'),
        ('two', None, "a number of processes, got 'two'"),
        ('3', {'fsdp_size': 2}, 'the mesh has 2 ranks .fsdp=2., but 3 processes were started'),
    ],
)
def test_incomplete_launchers_are_refused(
    world_size: str, mesh: dict[str, int] | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing rank, an invalid world size and a mesh of a different size are refused before a model is loaded."""
    twinkle.initialize()
    before = runtime()
    monkeypatch.setenv('WORLD_SIZE', world_size)
    device_mesh = None if mesh is None else twinkle.DeviceMesh.from_sizes(**mesh)
    with pytest.raises(ValueError, match=message):
        twinkle.initialize(global_device_mesh=device_mesh)
    with pytest.raises(ValueError, match=message):
        TransformersModel('never-loaded', device_mesh=device_mesh)
    assert runtime() is before
    monkeypatch.setenv('WORLD_SIZE', '1')
    twinkle.initialize()


@pytest.mark.parametrize('options', [{'gpus_per_worker': 2}, {'visible_devices': '0,1'}])
def test_devices_of_workers_are_refused(options: dict[str, Any]) -> None:
    """A group that assigns devices to worker processes is refused with an error that names the setting."""
    with pytest.raises(NotSupportedYet, match=next(iter(options))):
        twinkle.initialize(groups=[twinkle.DeviceGroup('train', 1, **options)])


@pytest.mark.parametrize(
    ('ranks', 'axes'),
    [
        ([[1, 0]], ('dp', 'fsdp')),
        ([[0, 3], [2, 1]], ('pp', 'tp')),
        ([[0, 1], [2, 4]], ('dp', 'tp')),
        # All axes ascend, but the ranks with `ulysses` index 1 are 1, 5, 4 and 7 in the order of the mesh.
        ([[[0, 1], [2, 5]], [[3, 4], [6, 7]]], ('dp', 'fsdp', 'ulysses')),
    ],
)
def test_ranks_in_another_order_are_refused(ranks: list[Any], axes: tuple[str, ...]) -> None:
    """A mesh whose ranks are not in the order of `from_sizes` is refused, because process groups sort their ranks."""
    mesh = twinkle.DeviceMesh(ranks, axes)
    with pytest.raises(ValueError, match=r'in the order of DeviceMesh\.from_sizes'):
        check_mesh(mesh, mesh.world_size)
