"""What every group of verbs has: the connection and the adapters by name."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from twinkle.api.model.v1.adapter_service_pb2_grpc import AdapterServiceStub
from twinkle_client.client import TwinkleClient, current_client
from twinkle_client.model.carriers import OperationResult
from twinkle_client.model.forward import log_warnings
from twinkle_client.model.operations import OperationLog
from twinkle_client.rpc import LoopThread


@dataclass(frozen=True)
class AdapterHandle:
    """An adapter of this program."""

    adapter_id: str
    operations: OperationLog


class ModelHandle:
    """A base model at the server, and this program's adapters of it by name."""

    def __init__(self, model_id: str, *, client: TwinkleClient | None = None) -> None:
        """Name the model; nothing is sent.

        Args:
            model_id: the base model, as the server's info names it.
            client: where. Unset: the client that was initialised last.

        Raises:
            RuntimeError: there is no client.
        """
        self.model_id = model_id
        self._client = current_client(client)
        self._connection = self._client.connection
        self._stub = AdapterServiceStub(self._connection.channel)
        self._adapters: dict[str, AdapterHandle] = {}
        self._promised: set[str] = set()

    @property
    def loop_thread(self) -> LoopThread:
        """Where its coroutines run."""
        return self._connection.loop_thread

    def adapter_id(self, adapter_name: str | None = None) -> str:
        """Return an adapter's id, which is also the run's.

        Raises:
            KeyError: there is none of that name.
        """
        return self._adapter(adapter_name).adapter_id

    def _adapter(self, adapter_name: str | None) -> AdapterHandle:
        """Return the adapter of that name; without one, the only one."""
        if adapter_name is None and len(self._adapters) == 1:
            return next(iter(self._adapters.values()))
        if adapter_name not in self._adapters:
            known = ', '.join(map(repr, self._adapters)) or 'none yet: call add_adapter_to_model'
            raise KeyError(f'adapter_name {adapter_name!r} is unknown; there is {known}')
        return self._adapters[adapter_name]

    def _check_name(self, adapter_name: str) -> None:
        if not adapter_name:
            raise ValueError('adapter_name is empty; give the adapter a name')
        if adapter_name in self._adapters or adapter_name in self._promised:
            raise ValueError(
                f'adapter_name {adapter_name!r} is taken in this model handle; choose another, or call remove_adapter '
                f'first ({adapter_name!r} may be used again in another handle)'
            )

    @contextmanager
    def _naming(self, adapter_name: str) -> Iterator[None]:
        """Keep a name from others while the server is asked for its adapter.

        Raises:
            ValueError: it is empty or taken.
        """
        self._check_name(adapter_name)
        self._promised.add(adapter_name)
        try:
            yield
        finally:
            self._promised.discard(adapter_name)

    async def _run(self, adapter_name: str | None, **verb: Any) -> OperationResult:
        return log_warnings(await self._adapter(adapter_name).operations.run(**verb))
