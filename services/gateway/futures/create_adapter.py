"""The executor that makes adapters."""

from services.gateway.futures.persistence import Persistence
from services.gateway.futures.rules import Future
from services.gateway.futures.trainer_ports import Trainer


class CreateAdapter:
    """Implements `ports.Executor`. Exactly once: the future's id is the request's, unless it brought its own."""

    def __init__(self, trainer: Trainer, persistence: Persistence) -> None:
        """Make them with `trainer`."""
        self._trainer = trainer
        self._persistence = persistence

    async def __call__(self, future: Future, payload: bytes) -> bytes:
        """Return the serialized CreateAdapterResponse.

        Raises:
            DomainError: the model service refused it.
        """
        trainer, tenant_id = self._trainer, future.tenant_id
        return await self._persistence.insist(
            lambda: trainer.create_adapter(tenant_id, payload, request_id=future.future_id)
        )

    async def stop(self, future: Future) -> bool:
        """Say that it goes on: half an adapter helps nobody."""
        del future
        return False
