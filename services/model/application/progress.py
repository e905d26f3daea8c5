"""Computes the adapter and the result after a verb has run, without I/O."""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from twinkle.data_format import StepResult
from twinkle_services.model.domain.adapter import Adapter
from twinkle_services.model.domain.engine import VerbRun
from twinkle_services.model.domain.operation import Load, Operation, Save, Undo, token_count
from twinkle_services.model.domain.result import OperationResult, Receipt, SaveResult
from twinkle_services.model.domain.step_metrics import metrics_after


def adapter_after(
    adapter: Adapter, operation: Operation, run: VerbRun | None, *, now: datetime, queue_time: timedelta = timedelta()
) -> Adapter:
    """Return the adapter after an operation. For a failed operation that used up its number, `run` must be None."""
    changes: dict[str, Any] = {'sequence_number': operation.sequence_number, 'update_time': now}
    if run is not None:
        changes['trained_token_count'] = adapter.trained_token_count + token_count(operation.verb)
    if run is not None and run.training_config is not None:
        changes['training_config'] = run.training_config
    if run is not None and run.step_count is not None:
        changes['step_count'] = run.step_count
    if run is not None:
        changes['checkpoint_path'] = _checkpoint_after(adapter, operation, run)
        changes['metrics'] = metrics_after(
            adapter.metrics,
            operation,
            run,
            step_count=changes.get('step_count', adapter.step_count),
            queue_seconds=queue_time.total_seconds(),
        )
    return replace(adapter, **changes)


def _checkpoint_after(adapter: Adapter, operation: Operation, run: VerbRun) -> str:
    """Return the path of the checkpoint that contains the weights after a verb; empty if no checkpoint does."""
    match operation.verb:
        case Save(is_optimizer_included=True, ttl=None) if isinstance(run.outcome, SaveResult):
            return run.outcome.checkpoint_path
        case Load(checkpoint_path=path):
            return path
        case Undo():
            return ''
        case _:
            is_changed = isinstance(run.outcome, StepResult) and run.outcome.is_applied
            return '' if is_changed else adapter.checkpoint_path


def result_of(operation: Operation, run: VerbRun, *, queue_time: timedelta = timedelta()) -> OperationResult:
    """Return the result of an operation, with its receipt."""
    receipt = Receipt(
        token_count=token_count(operation.verb),
        padding_token_count=run.padding_token_count,
        device_time=timedelta(seconds=run.device_seconds),
        queue_time=queue_time + timedelta(seconds=run.wait_seconds),
        request_bytes=operation.request_bytes,
        pass_count=run.pass_count,
        pass_adapter_count=run.pass_adapter_count,
        shared_token_count=run.shared_token_count,
    )
    return OperationResult(
        adapter_id=operation.adapter_id,
        sequence_number=operation.sequence_number,
        outcome=run.outcome,
        receipt=receipt,
        warnings=run.warnings,
        next_cursor=operation.next_cursor,
    )
