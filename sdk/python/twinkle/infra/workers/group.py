"""The worker processes of a group, which are Ray actors."""

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from twinkle.infra.device_group import DeviceGroup
from twinkle.infra.errors import WorkersLost
from twinkle.infra.logs import get_logger
from twinkle.infra.workers.dispatch import Call
from twinkle.infra.workers.worker import RemoteIterator, Worker, WorkerSettings

_GRACE_SECONDS = 60.0
"""Time for the other workers to end a call after a worker failed. All workers are killed afterwards, because some may
wait for the failed worker."""


class WorkerGroup:
    """The workers of one `DeviceGroup`. They start when the first component is created.

    Concurrency: one thread at a time, so that all workers receive the calls in the same order.
    """

    def __init__(
        self,
        group: DeviceGroup,
        placement: PlacementGroup,
        resources: Mapping[str, float],
        settings: WorkerSettings,
    ) -> None:
        """Create the group without starting processes.

        Args:
            group: name and size of the group.
            placement: placement group of Ray with one bundle per rank.
            resources: resources of each worker: CPU or GPU.
            settings: settings of each worker.
        """
        self.name = group.name
        self.size = group.size
        self.device_type = 'cuda' if resources.get('GPU') else 'cpu'
        self._placement = placement
        self._resources = resources
        self._settings = settings
        self._workers: list[ActorHandle[Worker]] = []
        self._numbers = itertools.count()
        self._torch_environment: list[dict[str, str]] = []
        self._is_lost = False

    def create(self, cls: type, args: Sequence[Any], options: Mapping[str, Any], *, is_joined: bool, count: int) -> int:
        """Create a component in the first `count` workers, and return its number.

        Args:
            cls: class of the component; its module must be importable in the workers.
            args: positional arguments of the constructor.
            options: keyword arguments of the constructor.
            is_joined: whether the workers are the ranks of one `torch.distributed` program.
            count: number of workers.

        Raises:
            Exception: the constructor raised it.
            WorkersLost: a worker ended.
        """
        self._start()
        number = next(self._numbers)
        none: dict[str, str] = {}
        environments = self._environments() if is_joined and self.size > 1 else [none] * count
        shared = ray.put((tuple(args), dict(options)))
        for worker in self._workers[:count]:
            cast('Any', worker).pause_collections.remote()
        self._wait(
            [
                cast('Any', worker).create.remote(number, cls, shared, environment)
                for worker, environment in zip(self._workers[:count], environments, strict=True)
            ]
        )
        return number

    def call(
        self,
        number: int,
        method: str,
        calls: Mapping[int, Call],
        *,
        wanted: Callable[[int], bool],
        timeout: float | None = None,
    ) -> Callable[[], list[Any]]:
        """Start a call in several workers; return a function that waits for the results.

        The function raises the exception of the method, TimeoutError after `timeout`, or WorkersLost if a worker ended.

        Args:
            number: number of the component.
            method: name of the method.
            calls: arguments by worker. Equal arguments are sent once.
            wanted: whether the result of a worker is returned; the results of other workers are not sent.
            timeout: time limit in seconds; None: no limit.
        """
        sent = {key: ray.put(call) for key, call in {id(call): call for call in calls.values()}.items()}
        references = [
            cast('Any', self._workers[index]).call.remote(
                number, method, sent[id(call)], is_result_wanted=wanted(index)
            )
            for index, call in calls.items()
        ]
        return lambda: self._wait(references, timeout=timeout)

    def read(self, number: int, name: str) -> Any:
        """Return an attribute of a component in the first worker."""
        (value,) = self._wait([cast('Any', self._workers[0]).read.remote(number, name)])
        return value

    def iterate(self, index: int, iterator: RemoteIterator) -> Iterator[Any]:
        """Yield the items of an iterator in a worker."""
        worker = cast('Any', self._workers[index])
        try:
            while True:
                (items,) = self._wait([worker.next_items.remote(iterator)])
                if not items:
                    return
                yield items[0]
        finally:
            worker.close_iterator.remote(iterator)

    def close(self) -> None:
        """Stop the workers and release their resources. Calling it again has no effect."""
        for worker in self._workers:
            ray.kill(worker)
        self._workers.clear()
        remove_placement_group(self._placement)

    def describe(self) -> list[str]:
        """Return one line per worker with its process and machine.

        The list is empty before the workers have started, and `['lost']` after they were lost.
        """
        if self._is_lost:
            return ['lost']
        if not self._workers:
            return []
        places = ray.get([cast('Any', worker).place.remote() for worker in self._workers])
        return [f'rank {rank}: {place}' for rank, place in enumerate(places)]

    def _start(self) -> None:
        if self._workers:
            return
        begin = time.monotonic()
        actor = cast('Any', ray.remote(Worker))
        self._workers = [
            actor.options(
                num_cpus=self._resources.get('CPU', 0),
                num_gpus=self._resources.get('GPU', 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._placement, placement_group_bundle_index=rank
                ),
            ).remote(self._settings)
            for rank in range(self.size)
        ]
        places = self.describe()
        get_logger().info(
            'workers started group=%s count=%d seconds=%.1f', self.name, len(places), time.monotonic() - begin
        )

    def _environments(self) -> list[dict[str, str]]:
        """Return the variables of `torch.distributed` for each worker. The first worker hosts its store."""
        if not self._torch_environment:
            ((address, port),) = self._wait([cast('Any', self._workers[0]).free_address.remote()])
            # Ray assigns separate devices to each worker, so each worker counts as the only process of its machine.
            common = {
                'MASTER_ADDR': address,
                'MASTER_PORT': str(port),
                'WORLD_SIZE': str(self.size),
                'LOCAL_RANK': '0',
                'LOCAL_WORLD_SIZE': '1',
            }
            self._torch_environment = [{**common, 'RANK': str(rank)} for rank in range(self.size)]
        return self._torch_environment

    def _wait(self, references: Sequence[Any], *, timeout: float | None = None) -> list[Any]:
        """Return the results. If workers failed, wait for the others, then raise the first error by rank."""
        deadline = None if timeout is None else time.monotonic() + timeout
        results: dict[Any, Any] = {}
        errors: dict[Any, Exception] = {}
        pending = list(references)
        while pending:
            remaining = None if deadline is None else max(deadline - time.monotonic(), 0)
            done, pending = cast('Any', ray).wait(pending, timeout=remaining)
            if not done:
                self._end()
                if errors:
                    break
                raise TimeoutError(
                    f'the call took longer than {timeout} s, so the workers of group {self.name!r} were killed; raise '
                    'the timeout of the method'
                )
            try:
                results[done[0]] = ray.get(done[0])
            except RayTaskError as error:
                errors[done[0]] = cast('Exception', error.cause)
                # Other workers may wait for the failed worker.
                deadline = min(deadline or sys.float_info.max, time.monotonic() + _GRACE_SECONDS)
            except RayActorError as error:
                self._end()
                raise WorkersLost(
                    f'a worker of group {self.name!r} ended during a call, so its components are lost: {error}'
                ) from error
        for reference in references:
            if reference in errors:
                raise errors[reference]
        return [results[reference] for reference in references]

    def _end(self) -> None:
        """Kill the workers, which may wait for each other; later calls raise WorkersLost."""
        self._is_lost = True
        for worker in self._workers:
            ray.kill(worker)
