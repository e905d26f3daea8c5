"""The part of Ray mode that runs in a worker process: components, and calls of their methods."""

import itertools
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import ray.util

from twinkle.infra.garbage import collections_paused
from twinkle.infra.runtime import Runtime, seed_generators, use_runtime
from twinkle.infra.workers.dispatch import Call


@dataclass(frozen=True)
class RemoteIterator:
    """Reference to an iterator in a worker, which a method returned and `Worker.next_items` reads."""

    number: int


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """Settings that the program passes to each worker."""

    folder: str
    """Working directory of the program; used if the worker's machine has it."""
    seed: int
    """Seed of the random number generators."""


class Worker:
    """Hosts components in one process of a group.

    Concurrency: Ray runs one call at a time.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        if Path(settings.folder).is_dir():
            os.chdir(settings.folder)
        self._seed = settings.seed
        self._components: dict[int, Any] = {}
        self._iterators: dict[int, Iterator[Any]] = {}
        self._numbers = itertools.count()
        use_runtime(Runtime(mode='ray', seed=settings.seed))
        self._imports = ExitStack()

    def place(self) -> str:
        """Return the process and machine of this worker, for reports."""
        return f'process {os.getpid()} on {cast("Any", ray.util).get_node_ip_address()}'

    def free_address(self) -> tuple[str, int]:
        """Return the address of this machine and a port that is free now."""
        with socket.socket() as listener:
            listener.bind(('', 0))
            return cast('Any', ray.util).get_node_ip_address(), listener.getsockname()[1]

    def pause_collections(self) -> None:
        """Pause garbage collection until the first component is created.

        Call this method before `create`, because Ray imports the class of the component, and thereby torch, before it
        calls `create`.
        """
        if not self._components:
            self._imports.enter_context(collections_paused())

    def create(self, number: int, cls: type, call: Call, environment: Mapping[str, str]) -> None:
        """Create a component.

        Args:
            number: new number of the component.
            cls: class of the component.
            call: arguments of the constructor.
            environment: environment variables to set first, such as the variables of `torch.distributed`.
        """
        os.environ.update(environment)
        # The class is imported now, so torch is seeded too if the component uses it.
        if not self._components:
            seed_generators(self._seed)
        args, named = call
        with self._imports:
            self._components[number] = cls(*args, **named)

    def call(self, number: int, method: str, call: Call, *, is_result_wanted: bool) -> Any:
        """Call a method of a component; return its result, or None if the result is not wanted.

        An iterator stays in the worker, and a `RemoteIterator` is returned instead.
        """
        args, named = call
        result = getattr(self._components[number], method)(*args, **named)
        if not is_result_wanted:
            return None
        if not isinstance(result, Iterator):
            return result
        iterator = RemoteIterator(next(self._numbers))
        self._iterators[iterator.number] = result
        return iterator

    def read(self, number: int, name: str) -> Any:
        """Return an attribute of a component."""
        return getattr(self._components[number], name)

    def next_items(self, iterator: RemoteIterator) -> list[Any]:
        """Return the next item of an iterator in a list; an empty list at its end."""
        items = list(itertools.islice(self._iterators[iterator.number], 1))
        if not items:
            self.close_iterator(iterator)
        return items

    def close_iterator(self, iterator: RemoteIterator) -> None:
        """Release an iterator. A generator that has not ended is closed."""
        released = self._iterators.pop(iterator.number, None)
        close = getattr(released, 'close', None)
        if close is not None:
            close()
