"""The process-wide runtime settings, and `initialize`, which sets them."""

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack

import numpy as np

from twinkle.infra.device_group import DeviceGroup
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.infra.errors import NotSupportedYet
from twinkle.infra.launcher import program_mesh


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
        mode: 'local' runs in this process, or in the processes that torchrun started; 'ray' is not supported yet.
        seed: seed of `random`, numpy and, if it is already imported, torch.
        full_determinism: make torch raise an error for nondeterministic algorithms.
        groups: named groups that components can be placed on. A group of one rank is this process, with one device.
        global_device_mesh: default mesh of components, with one rank per process. None: data parallel over the
            processes that torchrun started.
        ray_options: options of mode 'ray'.

    Raises:
        ValueError: `mode` is unknown, an option does not apply to it, two groups have the same name, or the mesh does
            not have one rank per process.
        NotSupportedYet: `mode` is 'ray', the mesh has an axis that is not supported, or a group assigns devices to
            workers.
    """
    if mode not in ('local', 'ray'):
        raise ValueError(f"mode must be 'local' or 'ray', got {mode!r}")
    if mode == 'ray':
        raise NotSupportedYet(
            "mode='ray' is not supported yet; use mode='local', with torchrun for several devices, or train through "
            '`twinkle up`'
        )
    if ray_options:
        raise ValueError(f"{sorted(ray_options)} apply to mode='ray' only; leave them out")
    mesh = program_mesh(global_device_mesh)
    _check_unique_names(groups)
    _refuse_assigned_devices(groups)
    if full_determinism and 'torch' not in sys.modules:
        raise ValueError('full_determinism is a setting of torch; import torch before calling initialize()')
    _current[0] = Runtime(seed=seed, device_mesh=mesh, groups=tuple(groups))
    _seed_all(seed, is_fully_deterministic=full_determinism)


def refuse_many_ranks(device_mesh: DeviceMesh | None) -> None:
    """Refuse a mesh of several ranks, for components that run in each process separately.

    Raises:
        NotSupportedYet: the mesh has more than one rank.
    """
    if device_mesh is not None and device_mesh.world_size > 1:
        raise NotSupportedYet(
            f'this component does not support a mesh of {device_mesh.world_size} ranks yet; leave device_mesh out, so '
            'that each process has a separate component'
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
