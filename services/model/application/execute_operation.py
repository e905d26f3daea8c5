"""Executes one operation: finds its adapter, waits for a slot, and runs it in the adapter's queue."""

from collections.abc import Callable

from twinkle_services.kit.caller import Caller, require_scope
from twinkle_services.kit.clock import Clock
from twinkle_services.kit.telemetry import spans
from twinkle_services.model.application.admission import Admission
from twinkle_services.model.application.carry_out import CarryOut
from twinkle_services.model.application.directory import AdapterDirectory
from twinkle_services.model.application.queues import Queues
from twinkle_services.model.domain.operation import Operation
from twinkle_services.model.domain.result import OperationResult, PublishResult


class ExecuteOperation:
    """Executes operations of all adapters."""

    def __init__(
        self, directory: AdapterDirectory, queues: Queues, admission: Admission, carry_out: CarryOut, *, clock: Clock
    ) -> None:
        self._directory = directory
        self._queues = queues
        self._admission = admission
        self._carry_out = carry_out
        self._clock = clock

    async def __call__(
        self,
        caller: Caller,
        operation: Operation,
        *,
        is_waiting_allowed: bool,
        on_admitted: Callable[[], None] = lambda: None,
    ) -> OperationResult:
        """Run the operation and return its result, or return the recorded result if it ran before.

        Args:
            caller: Owner of the adapter.
            operation: The operation.
            is_waiting_allowed: Whether to wait for a slot if the tenant's queue is full.
            on_admitted: Function to call once the operation has a slot; if it raises, the operation is refused.

        Raises:
            AdapterNotFound, AdapterExpired, AdapterDamaged: See `AdapterDirectory.get`.
            ScopeMissing: The API key lacks the scope `train`, `data` for a batch from a loader, or `full_parameters`
                for a full-parameter adapter.
            QueueFull: The tenant has too many operations in progress.
            SequenceReused, SequenceGap, OperationNotFound: The number is wrong; see `AdapterQueue.carry_out`.
            Cancelled: The operation was cancelled, or the adapter's session ended, while the operation waited.
            DomainError: The operation was refused or failed; see `CarryOut`.
        """
        with spans.span(
            f'operation {operation.verb_name}',
            verb=operation.verb_name,
            adapter_id=operation.adapter_id,
            sequence_number=operation.sequence_number,
        ) as span:
            result = await self._execute(
                caller, operation, is_waiting_allowed=is_waiting_allowed, on_admitted=on_admitted
            )
            spans.annotate(span, token_count=result.receipt.token_count, is_replayed=result.is_replayed)
            if isinstance(result.outcome, PublishResult):
                spans.annotate(span, version=result.outcome.version, size_bytes=result.outcome.size_bytes)
            return result

    async def _execute(
        self, caller: Caller, operation: Operation, *, is_waiting_allowed: bool, on_admitted: Callable[[], None]
    ) -> OperationResult:
        if self._directory.get(caller, operation.adapter_id).is_full_parameter:
            require_scope(caller, 'full_parameters')
        if operation.batch_reference is not None:
            require_scope(caller, 'data')
        arrival = self._clock.monotonic()
        async with self._queues.use(operation.adapter_id) as queue:
            slot = self._admission.slot(
                caller.tenant_id,
                adapter_id=operation.adapter_id,
                size_bytes=operation.request_bytes,
                is_waiting_allowed=is_waiting_allowed,
                is_urgent=queue.is_urgent(operation),
            )
            async with slot:
                on_admitted()
                return await queue.carry_out(operation, lambda: self._carry_out(caller, operation, arrival=arrival))
