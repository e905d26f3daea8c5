"""The program's one runtime: what `initialize` was told."""

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack

import numpy as np

from twinkle.infra.device_group import DeviceGroup
from twinkle.infra.device_mesh import DeviceMesh


class NotSupportedYet(NotImplementedError):
    """A documented way of running that this release does not have; the sentence says what to use instead."""


class RayOptions(TypedDict, total=False):
    """Options that mean something under Ray only."""

    nproc_per_node: int
    ncpu_proc_per_node: int
    lazy_collect: bool
    name: str
    notifier: Any


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """How the program runs."""

    seed: int | None = None
    """Seed given to `initialize`. None: it was not called."""
    device_mesh: DeviceMesh | None = None
    """Mesh of components that are given none."""
    groups: tuple[DeviceGroup, ...] = ()
    """Named groups of ranks."""


_current: list[Runtime] = [Runtime()]


def runtime() -> Runtime:
    """Return what `initialize` was last told."""
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
    """Choose how the program runs, and seed its random numbers.

    Args:
        mode: 'local' is this process.
        seed: of `random`, numpy and, where it is loaded already, torch.
        full_determinism: make torch refuse algorithms that are not repeatable.
        groups: named ranks that components are placed on; under 'local' those of one rank are this process.
        global_device_mesh: mesh of components that are given none.
        ray_options: of mode 'ray'.

    Raises:
        ValueError: `mode` is unknown, an option means nothing under it, or two groups have one name.
        NotSupportedYet: mode 'ray', or a mesh of more than one rank.
    """
    if mode not in ('local', 'ray'):
        raise ValueError(f"mode must be 'local' or 'ray', got {mode!r}")
    if mode == 'ray':
        raise NotSupportedYet(
            "mode='ray' is not supported yet; use mode='local' and one device, or train through `twinkle up`"
        )
    if ray_options:
        raise ValueError(f"{sorted(ray_options)} mean something under mode='ray' only; leave them out")
    refuse_many_ranks(global_device_mesh)
    _refuse_twins(groups)
    if full_determinism and 'torch' not in sys.modules:
        raise ValueError('full_determinism is a setting of torch: import torch before initialize()')
    _current[0] = Runtime(seed=seed, device_mesh=global_device_mesh, groups=tuple(groups))
    _seed_all(seed, is_fully_deterministic=full_determinism)


def refuse_many_ranks(device_mesh: DeviceMesh | None) -> None:
    """Refuse a mesh that this release cannot run.

    Raises:
        NotSupportedYet: it has more than one rank.
    """
    if device_mesh is not None and device_mesh.world_size > 1:
        sizes = zip(device_mesh.mesh_dim_names, device_mesh.mesh.shape, strict=True)
        axes = ' x '.join(f'{name}={size}' for name, size in sizes if size > 1)
        raise NotSupportedYet(
            f'a mesh of {device_mesh.world_size} ranks ({axes}) needs torchrun or Ray, and neither is supported yet; '
            'leave the mesh out to run on one device, or train through `twinkle up`'
        )


def _refuse_twins(groups: Sequence[DeviceGroup]) -> None:
    names = [group.name for group in groups]
    twins = sorted({name for name in names if names.count(name) > 1})
    if twins:
        raise ValueError(f'groups name {twins} twice')


def _seed_all(seed: int, *, is_fully_deterministic: bool) -> None:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - libraries that draw from numpy's global generator
    # Whoever has not loaded torch draws nothing from it; loading it here would cost seconds and memory.
    torch = sys.modules.get('torch')
    if torch is not None:
        torch.manual_seed(seed)
        torch.use_deterministic_algorithms(is_fully_deterministic)
