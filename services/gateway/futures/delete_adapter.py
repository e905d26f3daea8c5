"""The executor that deletes adapters."""

from functools import partial

from services.gateway.futures.persistence import Persistence
from services.gateway.futures.ports import FutureStore
from services.gateway.futures.rules import Future
from services.gateway.futures.trainer_ports import Trainer
from services.kit.errors import DomainError

_SENT = 1
"""Kept as the future's number before it is sent."""


class DeleteAdapter:
    """Implements `ports.Executor`. One that was sent before, and finds nothing, has done its work then."""

    def __init__(self, trainer: Trainer, store: FutureStore, persistence: Persistence) -> None:
        """Delete them with `trainer`, and keep in `store` what was sent."""
        self._trainer = trainer
        self._store = store
        self._insist = persistence.insist

    async def __call__(self, future: Future, payload: bytes) -> bytes:
        """Return the serialized DeleteAdapterResponse.

        Raises:
            DomainError: the model service refused it.
        """
        attempts = 0 if future.number is None else 1
        if future.number is None:
            await self._insist(partial(self._store.number, future, _SENT, instead_of=None))

        async def delete() -> bytes:
            nonlocal attempts
            attempts += 1
            return await self._trainer.delete_adapter(future.tenant_id, payload)

        try:
            return await self._insist(delete)
        except DomainError as error:
            if attempts > 1 and error.reason == 'ADAPTER_NOT_FOUND':
                return b''
            raise

    async def stop(self, future: Future) -> bool:
        """Say that it goes on: it takes no time."""
        del future
        return False
