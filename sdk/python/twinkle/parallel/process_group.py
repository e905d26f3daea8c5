"""Connections between the processes that torchrun has started."""

import atexit
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous  # pyright: ignore[reportUnknownVariableType]

from twinkle.infra import get_logger, process_count

_TIMEOUT = timedelta(hours=2)
"""Time limit of a call that waits for other processes, in case a process hangs; longer than any pass.

The end of a process is detected immediately.
"""
_STORE_TIMEOUT = timedelta(seconds=30)
"""Time limit of an operation of `program_store`."""
_rendezvous = cast('Callable[..., Iterator[tuple[Store, int, int]]]', rendezvous)


def join_ranks(device_type: str) -> None:
    """Connect this process to the other processes of its program; every process must call this function.

    Further calls, and calls in a program of one process, do nothing. If the model is on GPUs and the machine has a GPU
    per process, the processes use NCCL, and the GPU with the number LOCAL_RANK becomes the current device. Otherwise
    they use gloo.

    Args:
        device_type: torch device type of the model.

    Raises:
        RuntimeError: the other processes cannot be reached.
    """
    if process_count() == 1 or dist.is_initialized():
        return
    local_count = int(os.environ.get('LOCAL_WORLD_SIZE') or process_count())
    has_devices = device_type == 'cuda' and torch.cuda.device_count() >= local_count
    if device_type == 'cuda' and not has_devices:
        get_logger().warning(
            'several processes share a GPU and its memory processes=%d gpus=%d',
            local_count,
            torch.cuda.device_count(),
        )
    if has_devices:
        torch.cuda.set_device(int(os.environ.get('LOCAL_RANK', '0')))
    store, rank, count = next(_rendezvous('env://', timeout=_TIMEOUT))
    dist.init_process_group(
        'nccl' if has_devices else 'gloo',
        store=_of_this_attempt(store),
        rank=rank,
        world_size=count,
        timeout=_TIMEOUT,
    )
    atexit.register(_destroy_process_group)


def join_alone() -> None:
    """Make the only process of a program a group of one rank, for libraries that need a group."""
    if not dist.is_initialized():
        dist.init_process_group('gloo', store=HashStore(), rank=0, world_size=1)
        atexit.register(_destroy_process_group)


def program_store() -> Store:
    """Return a new connection to the key-value store of the program's processes, with a prefix that no other code uses.

    Raises:
        RuntimeError: the store cannot be reached.
    """
    address, port = os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])
    return PrefixStore('twinkle', _of_this_attempt(TCPStore(address, port, is_master=False, timeout=_STORE_TIMEOUT)))


def _of_this_attempt(store: Store) -> Store:
    """Return a view of a store without the keys of earlier attempts.

    torchrun keeps its store when it restarts all processes. Without a prefix, the new processes would read the
    addresses of the old processes.
    """
    return PrefixStore(f'attempt-{os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")}', store)


def _destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
