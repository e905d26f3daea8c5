"""Unit tests of `initialize` and of the meshes that it accepts."""

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import twinkle
from twinkle.infra import NotSupportedYet, runtime
from twinkle.model import TransformersModel


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


@pytest.mark.parametrize('world_size', ['2', '16', ' 2 '])
def test_processes_of_a_launcher_are_refused(world_size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with WORLD_SIZE above 1 is refused without a mesh too, and the settings stay unchanged."""
    before = runtime()
    monkeypatch.setenv('WORLD_SIZE', world_size)
    with pytest.raises(NotSupportedYet, match='WORLD_SIZE'):
        twinkle.initialize()
    with pytest.raises(NotSupportedYet, match='WORLD_SIZE'):
        TransformersModel('never-loaded')
    assert runtime() is before
    monkeypatch.setenv('WORLD_SIZE', '1')
    twinkle.initialize()


def test_torchrun_is_refused_in_every_process(tmp_path: Path) -> None:
    """A program under torchrun ends with a message that names the cause, before it writes a file."""
    program = tmp_path / 'program.py'
    program.write_text(
        "import pathlib, twinkle\ntwinkle.initialize(mode='local')\npathlib.Path('trained').touch()\n", encoding='utf-8'
    )
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2', str(program)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode != 0
    assert 'NotSupportedYet: WORLD_SIZE is 2' in ended.stderr
    assert not (tmp_path / 'trained').exists()


@pytest.mark.parametrize('options', [{'gpus_per_worker': 2}, {'visible_devices': '0,1'}])
def test_devices_of_workers_are_refused(options: dict[str, Any]) -> None:
    """A group that assigns devices to worker processes is refused by the name of the setting."""
    with pytest.raises(NotSupportedYet, match=next(iter(options))):
        twinkle.initialize(groups=[twinkle.DeviceGroup('train', 1, **options)])
