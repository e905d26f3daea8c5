"""The process-wide runtime settings, and `initialize`, which sets them."""

import os
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack

import numpy as np

from twinkle.infra.device_group import DeviceGroup
from twinkle.infra.device_mesh import DeviceMesh


class NotSupportedYet(NotImplementedError):
    """A documented mode that this release does not implement. The message names an alternative."""


class RayOptions(TypedDict, total=False):
    """Options that apply to Ray only."""

    nproc_per_node: int
    ncpu_proc_per_node: int
    lazy_collect: bool
    name: str
    notifier: Any


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Runtime settings of the program."""

    seed: int | None = None
    """Seed passed to `initialize`. None: it was not called."""
    device_mesh: DeviceMesh | None = None
    """Default mesh of components."""
    groups: tuple[DeviceGroup, ...] = ()
    """Named groups of ranks."""


_current: list[Runtime] = [Runtime()]


def runtime() -> Runtime:
    """Return the settings of the last call of `initialize`."""
    return _current[0]


def initialize(
    mode: Literal['local', 'ray'] = 'local',
    *,
    seed: int = 42,
    full_determinism: bool = False,
    groups: Sequence[DeviceGroup] = (),
    global_device_mesh: DeviceMesh | None = None,
    **ray_options: Unpack[RayOptions],
) -> None:
    """Set the runtime settings and seed the random number generators.

    Args:
        mode: 'local' runs in this process; 'ray' is not supported yet.
        seed: seed of `random`, numpy and, if it is already imported, torch.
        full_determinism: make torch raise an error for nondeterministic algorithms.
        groups: named groups that components can be placed on. A group of one rank is this process, with one device.
        global_device_mesh: default mesh of components.
        ray_options: options of mode 'ray'.

    Raises:
        ValueError: `mode` is unknown, an option does not apply to it, or two groups have the same name.
        NotSupportedYet: `mode` is 'ray', the mesh has more than one rank, a group assigns devices to workers, or a
            launcher such as torchrun started several processes.
    """
    if mode not in ('local', 'ray'):
        raise ValueError(f"mode must be 'local' or 'ray', got {mode!r}")
    if mode == 'ray':
        raise NotSupportedYet(
            "mode='ray' is not supported yet; use mode='local' and one device, or train through `twinkle up`"
        )
    if ray_options:
        raise ValueError(f"{sorted(ray_options)} apply to mode='ray' only; leave them out")
    refuse_many_ranks(global_device_mesh)
    refuse_launched_ranks()
    _check_unique_names(groups)
    _refuse_assigned_devices(groups)
    if full_determinism and 'torch' not in sys.modules:
        raise ValueError('full_determinism is a setting of torch; import torch before calling initialize()')
    _current[0] = Runtime(seed=seed, device_mesh=global_device_mesh, groups=tuple(groups))
    _seed_all(seed, is_fully_deterministic=full_determinism)


def refuse_many_ranks(device_mesh: DeviceMesh | None) -> None:
    """Refuse a mesh that this release cannot run.

    Raises:
        NotSupportedYet: the mesh has more than one rank.
    """
    if device_mesh is not None and device_mesh.world_size > 1:
        sizes = zip(device_mesh.mesh_dim_names, device_mesh.mesh.shape, strict=True)
        axes = ' x '.join(f'{name}={size}' for name, size in sizes if size > 1)
        raise NotSupportedYet(
            f'a mesh of {device_mesh.world_size} ranks ({axes}) needs torchrun or Ray, and neither is supported yet; '
            'leave the mesh out to run on one device, or train through `twinkle up`'
        )


def refuse_launched_ranks() -> None:
    """Refuse to run as one of several processes of torchrun, which would all train the same batches.

    Raises:
        NotSupportedYet: the environment variable WORLD_SIZE is more than 1.
    """
    world_size = os.environ.get('WORLD_SIZE', '').strip()
    if world_size not in ('', '0', '1'):
        raise NotSupportedYet(
            f'WORLD_SIZE is {world_size}, so a launcher such as torchrun started several processes, and each of them '
            'would train the same batches and save to the same folder; run one process with `python`, or train '
            'through `twinkle up`'
        )


def _refuse_assigned_devices(groups: Sequence[DeviceGroup]) -> None:
    """Refuse settings of groups that only separate worker processes could follow."""
    for group in groups:
        if group.gpus_per_worker != 1:
            raise NotSupportedYet(
                f'group {group.name!r} has gpus_per_worker={group.gpus_per_worker}, but components use one device; '
                'leave it out'
            )
        if group.visible_devices is not None:
            raise NotSupportedYet(
                f'group {group.name!r} has visible_devices={group.visible_devices!r}, but components run in this '
                'process; set CUDA_VISIBLE_DEVICES before the program starts, and leave it out'
            )


def _check_unique_names(groups: Sequence[DeviceGroup]) -> None:
    names = [group.name for group in groups]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise ValueError(f'groups must have distinct names, got {duplicates} twice')


def _seed_all(seed: int, *, is_fully_deterministic: bool) -> None:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - other libraries use numpy's global generator
    # Importing torch here would cost seconds and memory, and a program that has not imported it does not use it.
    torch = sys.modules.get('torch')
    if torch is not None:
        torch.manual_seed(seed)
        torch.use_deterministic_algorithms(is_fully_deterministic)
