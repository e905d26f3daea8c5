"""Carry out one operation: in its turn, once, with a receipt."""

from datetime import timedelta

from services.kit.caller import Caller
from services.kit.clock import Clock
from services.kit.errors import NotBuiltYet
from services.model.application.adapter_queue import AdapterQueue
from services.model.application.admission import Admission
from services.model.application.directory import AdapterDirectory
from services.model.domain.adapter import Adapter
from services.model.domain.operation import Load, Operation, PublishVersion, Save, StateVerb, token_count
from services.model.domain.result import OperationResult, Outcome, Receipt
from services.model.ports import TrainerBackend, VerbRun, WeightStore


class ExecuteOperation:
    """The heart of the service."""

    def __init__(
        self,
        directory: AdapterDirectory,
        backend: TrainerBackend,
        store: WeightStore,
        admission: Admission,
        *,
        clock: Clock,
        gap_seconds: float,
    ) -> None:
        """Use the parts given; `gap_seconds` as in `AdapterQueue`."""
        self._directory = directory
        self._backend = backend
        self._store = store
        self._admission = admission
        self._clock = clock
        self._gap_seconds = gap_seconds
        self._queues: dict[str, AdapterQueue] = {}

    async def __call__(self, caller: Caller, operation: Operation, *, is_waiting_allowed: bool) -> OperationResult:
        """Return the operation's result, from the record if it ran before.

        Raises:
            AdapterNotFound: no such adapter of the caller.
            QueueFull: the tenant has too much under way.
            DomainError: whatever carrying it out raised.
        """
        self._directory.get(caller, operation.adapter_id)
        queue = self.queue_of(operation.adapter_id)
        arrival = self._clock.monotonic()
        async with self._admission.place(caller.tenant_id, is_waiting_allowed=is_waiting_allowed):
            return await queue.carry_out(operation, lambda: self._run(caller, operation, arrival))

    def queue_of(self, adapter_id: str) -> AdapterQueue:
        """Return the adapter's queue."""
        if adapter_id not in self._queues:
            self._queues[adapter_id] = AdapterQueue(
                adapter_id,
                gap_seconds=self._gap_seconds,
                on_failed=lambda number: self._note_number(adapter_id, number),
            )
        return self._queues[adapter_id]

    async def forget(self, adapter_id: str) -> None:
        """Drop a deleted adapter's queue, once what runs is done."""
        queue = self._queues.pop(adapter_id, None)
        if queue is not None:
            await queue.close()

    async def close(self) -> None:
        """Wait for every operation that runs."""
        for adapter_id in list(self._queues):
            await self.forget(adapter_id)

    async def _run(self, caller: Caller, operation: Operation, arrival: float) -> OperationResult:
        # An adapter deleted while its operation waited is gone.
        adapter = self._directory.get(caller, operation.adapter_id)
        begin = self._clock.monotonic()
        verb = operation.verb
        if isinstance(verb, StateVerb):
            run = await self._run_state_verb(adapter, operation, verb)
        else:
            run = await self._backend.run(adapter.adapter_id, verb)
        self._note(adapter, operation, run)
        receipt = Receipt(
            token_count=token_count(verb),
            padding_token_count=run.padding_token_count,
            device_time=timedelta(seconds=run.device_seconds),
            queue_time=timedelta(seconds=begin - arrival),
            request_bytes=operation.request_bytes,
        )
        return OperationResult(
            adapter_id=adapter.adapter_id,
            sequence_number=operation.sequence_number,
            outcome=run.outcome,
            receipt=receipt,
            warnings=run.warnings,
        )

    def _note(self, adapter: Adapter, operation: Operation, run: VerbRun) -> None:
        changes: dict[str, object] = {
            'sequence_number': operation.sequence_number,
            'update_time': self._clock.now(),
        }
        if run.training_config is not None:
            changes['training_config'] = run.training_config
        if run.step_count is not None:
            changes['step_count'] = run.step_count
        self._directory.update(adapter.adapter_id, **changes)

    def _note_number(self, adapter_id: str, number: int) -> None:
        self._directory.update(adapter_id, sequence_number=number, update_time=self._clock.now())

    async def _run_state_verb(self, adapter: Adapter, operation: Operation, verb: StateVerb) -> VerbRun:
        if isinstance(verb, PublishVersion):
            return VerbRun(outcome=await self._publish(adapter, verb))
        if isinstance(verb, Save):
            return VerbRun(outcome=await self._save(adapter, verb, request_id=operation.request_id))
        if isinstance(verb, Load):
            return await self._load(adapter, verb)
        raise NotBuiltYet(f'the operation {operation.verb_name}')

    async def _publish(self, adapter: Adapter, verb: PublishVersion) -> Outcome:
        state = await self._backend.export_state(adapter.adapter_id, is_trainer_included=False)
        result = await self._store.publish_version(
            adapter.adapter_id,
            state,
            base_model=adapter.base_model,
            version=adapter.version + 1,
            is_pinned=verb.is_pinned,
        )
        self._directory.update(adapter.adapter_id, version=result.version)
        return result

    async def _save(self, adapter: Adapter, verb: Save, *, request_id: str) -> Outcome:
        state = await self._backend.export_state(adapter.adapter_id, is_trainer_included=verb.is_optimizer_included)
        return await self._store.save(
            adapter.adapter_id, state, base_model=adapter.base_model, save=verb, request_id=request_id
        )

    async def _load(self, adapter: Adapter, verb: Load) -> VerbRun:
        state = await self._store.fetch(verb.checkpoint_path, is_trainer_included=verb.is_optimizer_included)
        return await self._backend.import_state(
            adapter.adapter_id, state, is_trainer_included=verb.is_optimizer_included
        )
