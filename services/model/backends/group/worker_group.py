"""Defines `WorkerGroup`, the processes that host the engine, and implements it for this process alone."""

from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import structlog

from twinkle_services.kit.errors import DomainError, Internal
from twinkle_services.kit.worker import SingleWorker
from twinkle_services.model.backends.group.host import EngineHost

_Arguments = ParamSpec('_Arguments')
_Result = TypeVar('_Result')
_log = structlog.get_logger('engine')


class WorkerGroup(Protocol):
    """Processes that each host an equal engine and run the same calls in the same order.

    Concurrency: calls may be awaited by many tasks. They run one at a time in order of arrival, and are never
    interrupted.
    """

    async def call(
        self,
        method: Callable[Concatenate[EngineHost, _Arguments], _Result],
        *args: _Arguments.args,
        **options: _Arguments.kwargs,
    ) -> _Result:
        """Call a method of the host in every process, and return the result of the first one.

        Raises:
            DomainError: The host refused the call. After a defect, a group of one process raises `Internal`, and all
                processes of a larger group exit.
        """
        ...

    async def close(self) -> None:
        """Stop the processes once the running call is done; calls in the queue may be cancelled."""
        ...


class InProcessGroup:
    """Implements `WorkerGroup` with the engine of this process, which runs in a separate thread."""

    def __init__(self, host: EngineHost, worker: SingleWorker) -> None:
        """Create the group, which uses `host` only in the thread of `worker`."""
        self._host = host
        self._worker = worker

    async def call(
        self,
        method: Callable[Concatenate[EngineHost, _Arguments], _Result],
        *args: _Arguments.args,
        **options: _Arguments.kwargs,
    ) -> _Result:
        """Call a method of the host; a defect is logged and raised as Internal."""
        try:
            return await self._worker.run(getattr(self._host, method.__name__), *args, **options)
        except DomainError:
            raise
        except Exception as error:
            adapter = next((argument for argument in args if isinstance(argument, str)), '')
            _log.error('call failed', method=method.__name__, adapter=adapter, exc_info=error)
            raise Internal('') from error

    async def close(self) -> None:
        """Stop the thread once the running call is done; calls in the queue are cancelled."""
        self._worker.close()
