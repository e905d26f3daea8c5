"""The process-wide runtime settings, and `initialize`, which sets them."""

import importlib
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypedDict, Unpack

import numpy as np

from twinkle.infra.device_group import DeviceGroup
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.infra.errors import NotSupportedYet
from twinkle.infra.launcher import program_mesh


class Workers(Protocol):
    """Worker processes of a program."""

    @property
    def groups(self) -> Mapping[str, Any]:
        """Workers of each group, by the group's name."""
        ...

    def close(self) -> None:
        """Stop all workers."""
        ...


class RayOptions(TypedDict, total=False):
    """Options that apply to Ray only."""

    nproc_per_node: int
    """Maximum number of workers with GPUs per machine, on average. Default: limited only by the cluster's GPUs."""
    ncpu_proc_per_node: int
    """Maximum number of workers without GPUs per machine, on average. Default: limited only by the cluster's cores. If
    Ray starts on this machine, it offers at least one core per worker."""
    lazy_collect: bool
    """Whether calls of components return a `LazyResult` before they complete. Default: False."""
    name: str
    """Namespace of the program in Ray. Default: a new namespace."""
    notifier: Any
    """Not supported yet."""


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Runtime settings of the program."""

    mode: Literal['local', 'ray'] = 'local'
    """Where components of a group run: in this process, or in workers."""
    seed: int | None = None
    """Seed passed to `initialize`. None: `initialize` was not called."""
    device_mesh: DeviceMesh | None = None
    """Default mesh of components."""
    groups: tuple[DeviceGroup, ...] = ()
    """Named groups of ranks."""
    cluster: Workers | None = None
    """Workers of the groups in mode 'ray'; None in a worker."""
    is_lazy: bool = False
    """Whether calls of components in workers return before they complete."""


_current: list[Runtime] = [Runtime()]


def runtime() -> Runtime:
    """Return the settings of the last call of `initialize`."""
    return _current[0]


def use_runtime(settings: Runtime) -> None:
    """Replace the settings of this process, and stop the workers of the previous settings."""
    previous, _current[0] = _current[0], settings
    if previous.cluster is not None:
        previous.cluster.close()


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
        mode: 'local' runs in this process, or in the processes that torchrun started. 'ray' runs the components of
            each group in worker processes on a Ray cluster. The environment variable RAY_ADDRESS names the cluster; if
            it is unset, Ray starts on this machine.
        seed: seed of `random`, numpy and, if it is already imported, torch; in mode 'ray' also in the workers.
        full_determinism: whether torch raises an error for nondeterministic algorithms.
        groups: named groups that components can be placed on. In mode 'ray', each rank is a worker process;
            otherwise, a group of one rank is this process, with one device.
        global_device_mesh: default mesh of components, with one rank per process. None: data parallel over the
            processes that torchrun started, or over the workers of a group.
        ray_options: options of mode 'ray'; see `RayOptions`.

    Raises:
        ValueError: `mode` or an option is unknown, or an option does not apply to the mode; two groups have the same
            name; the mesh does not have one rank per process; or `full_determinism` is set before torch is imported. In
            mode 'ray' also: two groups have a common rank, there are no groups, or the Ray cluster does not have the
            resources of the groups.
        NotSupportedYet: the mesh has an axis that is not supported; a group has `visible_devices`, a device type that
            Ray mode does not support, or several GPUs per worker in mode 'local'; `notifier` is given; or
            `full_determinism` is set in mode 'ray'.
        ImportError: `mode` is 'ray', and Ray is not installed; the extra is 'ray'.
        ConnectionError: the Ray cluster cannot be reached.
    """
    if mode not in ('local', 'ray'):
        raise ValueError(f"mode must be 'local' or 'ray', got {mode!r}")
    if ray_options and mode != 'ray':
        raise ValueError(f"{sorted(ray_options)} apply to mode='ray' only; leave them out")
    if full_determinism and 'torch' not in sys.modules:
        raise ValueError('full_determinism is a setting of torch; import torch before calling initialize()')
    _check_unique_names(groups)
    _refuse_visible_devices(groups)
    if mode == 'ray':
        if full_determinism:
            raise NotSupportedYet("full_determinism is not supported in mode='ray' yet; leave it out")
        use_runtime(_ray_runtime(seed, tuple(groups), global_device_mesh, ray_options))
    else:
        _refuse_several_devices(groups)
        use_runtime(Runtime(seed=seed, device_mesh=program_mesh(global_device_mesh), groups=tuple(groups)))
    seed_generators(seed, is_fully_deterministic=full_determinism)


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


def _ray_runtime(seed: int, groups: tuple[DeviceGroup, ...], mesh: DeviceMesh | None, options: RayOptions) -> Runtime:
    """Connect to Ray and return the settings of a program whose components run in workers."""
    unknown = sorted(set(options) - set(RayOptions.__annotations__))
    if unknown:
        raise ValueError(f'unknown options {unknown}; known are {sorted(RayOptions.__annotations__)}')
    if options.get('notifier') is not None:
        raise NotSupportedYet('notifier is not supported yet; leave it out')
    if not groups:
        raise ValueError("mode='ray' needs groups=[DeviceGroup(...)], whose ranks are the workers")
    try:
        library = importlib.import_module('twinkle.infra.workers.cluster')
    except ImportError as error:
        raise ImportError("mode='ray' needs Ray: pip install 'twinkle-grpc[ray]'") from error
    settings = library.ClusterOptions(
        seed=seed,
        name=options.get('name'),
        nproc_per_node=options.get('nproc_per_node'),
        ncpu_proc_per_node=options.get('ncpu_proc_per_node'),
    )
    use_runtime(Runtime())
    return Runtime(
        mode='ray',
        seed=seed,
        device_mesh=mesh,
        groups=groups,
        cluster=library.Cluster(groups, settings),
        is_lazy=options.get('lazy_collect', False),
    )


def _refuse_several_devices(groups: Sequence[DeviceGroup]) -> None:
    for group in groups:
        if group.gpus_per_worker != 1:
            raise NotSupportedYet(
                f'group {group.name!r} has gpus_per_worker={group.gpus_per_worker}, but components use one device; '
                "leave it out, or use mode='ray'"
            )


def _refuse_visible_devices(groups: Sequence[DeviceGroup]) -> None:
    for group in groups:
        if group.visible_devices is not None:
            raise NotSupportedYet(
                f'group {group.name!r} has visible_devices={group.visible_devices!r}, which is not supported; set '
                'CUDA_VISIBLE_DEVICES before the program or Ray starts, and leave it out'
            )


def _check_unique_names(groups: Sequence[DeviceGroup]) -> None:
    names = [group.name for group in groups]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise ValueError(f'groups must have distinct names, got {duplicates} twice')


def seed_generators(seed: int, *, is_fully_deterministic: bool = False) -> None:
    """Seed `random`, numpy and, if it is imported, torch."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - other libraries use numpy's global generator
    # Importing torch here would cost seconds and memory, and a program that has not imported it does not use it.
    torch = sys.modules.get('torch')
    if torch is not None:
        torch.manual_seed(seed)
        torch.use_deterministic_algorithms(is_fully_deterministic)
