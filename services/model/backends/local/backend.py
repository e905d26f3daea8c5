"""Implements the trainer port with an engine that runs in a separate thread."""

from collections.abc import Sequence

from services.kit.errors import DomainError
from services.kit.server_facts import ServerFacts
from services.kit.worker import SingleWorker
from services.model.backends.local.host import EngineHost
from services.model.backends.local.loading import LoadOptions, facts_of, load_engine
from services.model.domain.engine import AdapterDescription, AdapterState, BatchPart, VerbRun
from services.model.domain.operation import ComputeVerb
from services.model.domain.training_config import TrainingConfig
from twinkle.data_format import LoraConfig
from twinkle.model.engine import TrainerEngine


class LocalBackend:
    """Hosts a `TrainerEngine`; implements `services.model.ports.TrainerBackend`.

    Concurrency: verbs may be awaited by many tasks; the engine runs them one at a time in order of arrival. A running
    verb is never interrupted.
    """

    def __init__(self, engine: TrainerEngine, facts: ServerFacts, worker: SingleWorker) -> None:
        """Create the backend, which uses `engine` only in the thread of `worker`."""
        self.engine = engine
        self.worker = worker
        self._facts = facts
        self._host = EngineHost(engine, token_limit=facts.batch_tokens)

    @classmethod
    async def load(cls, options: LoadOptions) -> 'LocalBackend':
        """Load a model and its engine.

        Raises:
            ModelNotFound: The id cannot be resolved.
            UnsupportedModel: The architecture is not supported.
        """
        worker = SingleWorker('trainer')
        engine = await worker.run(load_engine, options)
        return cls(engine, facts_of(options, engine.model), worker)

    def facts(self) -> ServerFacts:
        return self._facts

    async def create_adapter(
        self,
        adapter_id: str,
        lora_config: LoraConfig,
        training_config: TrainingConfig,
        *,
        full_parameters: Sequence[str] | None = None,
    ) -> AdapterDescription:
        return await self.worker.run(
            self._host.create, adapter_id, lora_config, training_config, full_parameters=full_parameters
        )

    async def delete_adapter(self, adapter_id: str) -> None:
        await self.worker.run(self._host.delete, adapter_id)

    async def run(self, adapter_id: str, verb: ComputeVerb) -> VerbRun:
        return await self.worker.run(self._host.run, adapter_id, verb)

    async def run_batch(self, parts: Sequence[BatchPart]) -> Sequence[VerbRun | DomainError]:
        return await self.worker.run(self._host.run_batch, parts)

    async def snapshot(self, adapter_id: str) -> AdapterState | None:
        return await self.worker.run(self._host.snapshot, adapter_id)

    async def restore_adapter(self, adapter_id: str, state: AdapterState) -> VerbRun:
        return await self.worker.run(self._host.restore, adapter_id, state)

    async def export_state(
        self, adapter_id: str, *, is_trainer_included: bool, consumed_train_samples: int | None = None
    ) -> AdapterState:
        return await self.worker.run(
            self._host.export_state,
            adapter_id,
            is_trainer_included=is_trainer_included,
            consumed_train_samples=consumed_train_samples,
        )

    async def import_state(self, adapter_id: str, state: AdapterState, *, is_trainer_included: bool) -> VerbRun:
        return await self.worker.run(
            self._host.import_state, adapter_id, state, is_trainer_included=is_trainer_included
        )

    async def close(self) -> None:
        """Stop the thread once the running verb is done."""
        self.worker.close()
