"""Base class of the model handle: the connection, and the adapters by name."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from twinkle.api.model.v1.adapter_service_pb2_grpc import AdapterServiceStub
from twinkle_client.client import TwinkleClient, current_client
from twinkle_client.model.forward import log_warnings
from twinkle_client.model.operations import OperationLog
from twinkle_client.model.senders import OperationResult
from twinkle_client.rpc import LoopThread


@dataclass(frozen=True)
class AdapterHandle:
    """An adapter that this program trains."""

    adapter_id: str
    operations: OperationLog


class ModelHandle:
    """A base model on the server, and the named adapters that this program trains on it.

    Args:
        model_id: Name of the base model, as reported by `TwinkleClient.get_server_info`.
        client: Client to use. Default: the most recently initialized client.

    Raises:
        RuntimeError: There is no client.
    """

    def __init__(self, model_id: str, *, client: TwinkleClient | None = None) -> None:
        self.model_id = model_id
        self._client = current_client(client)
        self._connection = self._client.connection
        self._stub = AdapterServiceStub(self._connection.channel)
        self._adapters: dict[str, AdapterHandle] = {}
        self._reserved: set[str] = set()

    def __repr__(self) -> str:
        adapters = {name: adapter.adapter_id for name, adapter in self._adapters.items()}
        return f'{type(self).__name__}({self.model_id!r}, adapters={adapters})'

    @property
    def loop_thread(self) -> LoopThread:
        """Event loop that runs the methods."""
        return self._connection.loop_thread

    def adapter_id(self, adapter_name: str | None = None) -> str:
        """Return an adapter's id, which is also the id of its run.

        Args:
            adapter_name: Name of the adapter. None: the only adapter.

        Raises:
            KeyError: No adapter has this name; or no name is given, and there is not exactly one adapter.
        """
        return self._adapter(adapter_name).adapter_id

    def _adapter(self, adapter_name: str | None) -> AdapterHandle:
        """Return the adapter with a name, or the only adapter for None."""
        if adapter_name is None and len(self._adapters) == 1:
            return next(iter(self._adapters.values()))
        if adapter_name not in self._adapters:
            known = ', '.join(map(repr, self._adapters)) or 'none; call add_adapter_to_model first'
            problem = 'is missing' if adapter_name is None else f'{adapter_name!r} is unknown'
            raise KeyError(f'adapter_name {problem}; known adapters: {known}')
        return self._adapters[adapter_name]

    def _check_name(self, adapter_name: str) -> None:
        if not adapter_name:
            raise ValueError('adapter_name is empty; name the adapter')
        if adapter_name in self._adapters or adapter_name in self._reserved:
            raise ValueError(
                f'adapter_name {adapter_name!r} already exists in this model handle; choose another name, call '
                'remove_adapter first, or use another handle'
            )

    @contextmanager
    def _reserved_name(self, adapter_name: str) -> Iterator[None]:
        """Reserve a name while the server creates or looks up its adapter.

        Raises:
            ValueError: The name is empty or taken.
        """
        self._check_name(adapter_name)
        self._reserved.add(adapter_name)
        try:
            yield
        finally:
            self._reserved.discard(adapter_name)

    async def _run(self, adapter_name: str | None, **verb: Any) -> OperationResult:
        return log_warnings(await self._adapter(adapter_name).operations.run(**verb))
