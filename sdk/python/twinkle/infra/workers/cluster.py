"""Placement of a program's groups on a Ray cluster."""

import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from twinkle.infra.device_group import DeviceGroup
from twinkle.infra.errors import NotSupportedYet
from twinkle.infra.workers.group import WorkerGroup
from twinkle.infra.workers.worker import WorkerSettings

_PLACEMENT_SECONDS = 60.0
"""Maximum time to wait for the resources of a group."""


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Arguments of `initialize` that the cluster uses."""

    seed: int
    """Seed of the workers."""
    name: str | None = None
    """Namespace of the program in Ray. None: a new namespace."""
    nproc_per_node: int | None = None
    """Maximum number of workers with GPUs per machine, on average. None: limited only by the cluster's GPUs."""
    ncpu_proc_per_node: int | None = None
    """Maximum number of workers without GPUs per machine, on average. None: limited only by the cluster's cores."""


class Cluster:
    """The groups of a program and their workers.

    The program uses the cluster at the environment variable RAY_ADDRESS. Without the variable, Ray starts on this
    machine and ends with the program.
    """

    def __init__(self, groups: Sequence[DeviceGroup], options: ClusterOptions) -> None:
        """Connect to Ray, and reserve the resources of all groups; no worker starts yet.

        Raises:
            ValueError: two groups have a common rank, or the cluster does not have the resources.
            NotSupportedYet: a group is on a type of device other than CPUs and CUDA GPUs.
            ConnectionError: the cluster cannot be reached.
        """
        _check_ranks(groups)
        _connect(groups, options)
        resources = _resources_by_group(groups, options)
        placements = [
            placement_group([dict(resources[group.name])] * group.size, strategy='PACK', name=group.name)
            for group in groups
        ]
        _wait_for(groups, placements)
        settings = WorkerSettings(folder=str(Path.cwd()), seed=options.seed)
        self._groups = {
            group.name: WorkerGroup(group, placement, resources[group.name], settings)
            for group, placement in zip(groups, placements, strict=True)
        }

    @property
    def groups(self) -> Mapping[str, WorkerGroup]:
        """The groups by name."""
        return self._groups

    def close(self) -> None:
        """Stop all workers and release their resources."""
        for group in self._groups.values():
            group.close()


def _check_ranks(groups: Sequence[DeviceGroup]) -> None:
    listed = Counter(rank for group in groups if not isinstance(group.ranks, int) for rank in group.ranks)
    common = sorted(rank for rank, count in listed.items() if count > 1)
    if common:
        raise ValueError(
            f'ranks {common} are in several groups; give each group its own ranks, or put the components into one group'
        )
    for group in groups:
        if group.device_type not in ('auto', 'cpu', 'cuda'):
            raise NotSupportedYet(
                f"group {group.name!r} is on {group.device_type!r}, which is not supported yet; use 'cpu' or 'cuda'"
            )


def _connect(groups: Sequence[DeviceGroup], options: ClusterOptions) -> None:
    if cast('Any', ray).is_initialized():
        return
    local: dict[str, Any] = {}
    if not os.environ.get('RAY_ADDRESS'):
        # Without an address, Ray would use a cluster of this machine that another program has started. The number of
        # cores may exceed that of the machine, because workers wait for each other most of the time.
        cores = max(os.cpu_count() or 1, sum(group.size for group in groups))
        local = {'address': 'local', 'num_cpus': cores, 'include_dashboard': False}
        # By default, Ray lowers the priority of its workers, so that other programs of the machine would delay them.
        os.environ.setdefault('RAY_worker_niceness', '0')
    ray.init(namespace=options.name, logging_level=logging.WARNING, **local)


def _resources_by_group(groups: Sequence[DeviceGroup], options: ClusterOptions) -> dict[str, dict[str, float]]:
    """Return the resources of one worker by group, after checking that the cluster has enough for all workers."""
    available: dict[str, float] = cast('Any', ray).cluster_resources()
    wants_gpu = sum(group.size * group.gpus_per_worker for group in groups if group.device_type != 'cpu')
    has_gpus = available.get('GPU', 0) >= wants_gpu
    resources: dict[str, dict[str, float]] = {}
    for group in groups:
        is_on_gpu = group.device_type == 'cuda' or (group.device_type == 'auto' and has_gpus)
        resources[group.name] = {'GPU': group.gpus_per_worker} if is_on_gpu else {'CPU': 1}
    nodes: list[dict[str, Any]] = cast('Any', ray).nodes()
    machine_count = sum(1 for node in nodes if node['Alive'])
    limits = {'GPU': options.nproc_per_node, 'CPU': options.ncpu_proc_per_node}
    for kind, per_node in limits.items():
        members = [group for group in groups if kind in resources[group.name]]
        needed = sum(group.size * resources[group.name][kind] for group in members)
        if needed > available.get(kind, 0):
            raise ValueError(
                f'groups {[group.name for group in members]} need {needed:g} {kind}s, but the cluster has '
                f'{available.get(kind, 0):g}; use fewer ranks, another device_type, or a larger cluster (RAY_ADDRESS)'
            )
        count = sum(group.size for group in members)
        if per_node is not None and count > per_node * machine_count:
            name = 'nproc_per_node' if kind == 'GPU' else 'ncpu_proc_per_node'
            limit = per_node * machine_count
            raise ValueError(f'{name}={per_node} allows {limit} workers, but the groups have {count}')
    return resources


def _wait_for(groups: Sequence[DeviceGroup], placements: Sequence[PlacementGroup]) -> None:
    for group, placement in zip(groups, placements, strict=True):
        if not placement.wait(_PLACEMENT_SECONDS):
            for reserved in placements:
                remove_placement_group(reserved)
            raise ValueError(
                f'group {group.name!r} got no resources within {_PLACEMENT_SECONDS:.0f} s, because other programs use '
                'the cluster; retry later'
            )
