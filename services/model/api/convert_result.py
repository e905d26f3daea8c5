"""Converts adapters, events of the change feed, and results of operations to messages."""

from typing import Any

from twinkle.api.data.v1 import dataset_pb2
from twinkle.api.model.v1 import (
    adapter_pb2,
    adapter_service_pb2,
    operation_result_pb2,
    training_config_pb2,
    training_service_pb2,
)
from twinkle.data_format import ForwardResult, LayerHealth, StepResult
from twinkle_services.kit.rpc.fields import duration_to_proto, timestamp_to_proto
from twinkle_services.kit.rpc.status import status_from_error
from twinkle_services.kit.rpc.tensors import tensor_to_proto
from twinkle_services.kit.weights.wire import lora_config_to_proto
from twinkle_services.model.api.convert_config import training_config_to_proto
from twinkle_services.model.application.directory import AdapterEvent
from twinkle_services.model.application.operations import OperationRecord, OperationState
from twinkle_services.model.application.train_stream import OperationFailure
from twinkle_services.model.domain import result as domain
from twinkle_services.model.domain.adapter import Adapter
from twinkle_services.model.domain.loader_batch import LoaderCursor
from twinkle_services.model.domain.step_metrics import MetricReport, StepMetrics

_STATES = {
    OperationState.QUEUED: training_service_pb2.OPERATION_STATE_QUEUED,
    OperationState.RUNNING: training_service_pb2.OPERATION_STATE_RUNNING,
    OperationState.DONE: training_service_pb2.OPERATION_STATE_DONE,
    OperationState.FAILED: training_service_pb2.OPERATION_STATE_FAILED,
}


def adapter_to_proto(adapter: Adapter, *, is_parked: bool = False) -> adapter_pb2.Adapter:
    lora_config = None if adapter.is_full_parameter else lora_config_to_proto(adapter.lora_config)
    return adapter_pb2.Adapter(
        adapter_id=adapter.adapter_id,
        base_model=adapter.base_model,
        lora_config=lora_config,
        training_config=training_config_to_proto(adapter.training_config),
        sequence_number=adapter.sequence_number,
        step_count=adapter.step_count,
        trained_token_count=adapter.trained_token_count,
        version=adapter.version,
        parameter_count=adapter.parameter_count,
        user_metadata=adapter.user_metadata,
        create_time=timestamp_to_proto(adapter.create_time),
        update_time=timestamp_to_proto(adapter.update_time),
        full_parameters=None
        if adapter.full_parameters is None
        else training_config_pb2.FullParameterConfig(target_modules=adapter.full_parameters),
        session_id=adapter.session_id,
        checkpoint_path=adapter.checkpoint_path,
        is_parked=is_parked,
        has_lease=adapter.has_lease,
        session_end_time=timestamp_to_proto(adapter.session_end_time) if adapter.session_end_time else None,
    )


def event_to_proto(event: AdapterEvent, *, are_reports_included: bool) -> adapter_service_pb2.WatchAdaptersResponse:
    message = adapter_service_pb2.WatchAdaptersResponse(tenant_id=event.tenant_id, resume_token=event.token)
    if event.adapter is not None:
        message.adapter.CopyFrom(adapter_to_proto(event.adapter))
        if are_reports_included:
            message.metrics.reports.extend(map(_report_to_proto, event.adapter.metrics.reports))
    elif event.is_synced:
        message.is_synced = True
    elif event.damaged_id:
        message.damaged_adapter_id = event.damaged_id
    else:
        message.deletion.adapter_id = event.deleted_id
    return message


def metrics_to_proto(metrics: StepMetrics) -> adapter_service_pb2.AdapterMetrics:
    return adapter_service_pb2.AdapterMetrics(reports=map(_report_to_proto, metrics.reports), totals=metrics.totals)


def _report_to_proto(report: MetricReport) -> adapter_service_pb2.MetricReport:
    return adapter_service_pb2.MetricReport(
        sequence_number=report.sequence_number, step=report.step, values=report.values
    )


def result_to_proto(result: domain.OperationResult | OperationFailure) -> operation_result_pb2.OperationResult:
    """Convert the result of an operation, or its failure."""
    message = operation_result_pb2.OperationResult(adapter_id=result.adapter_id, sequence_number=result.sequence_number)
    if isinstance(result, OperationFailure):
        message.error.CopyFrom(status_from_error(result.error))
        return message
    _set_outcome(message, result.outcome)
    message.receipt.CopyFrom(_receipt_to_proto(result.receipt))
    message.warnings.extend(result.warnings)
    message.is_replayed = result.is_replayed
    if result.next_cursor is not None:
        message.next_cursor.CopyFrom(cursor_to_proto(result.next_cursor))
    return message


def cursor_to_proto(cursor: LoaderCursor) -> dataset_pb2.Cursor:
    return dataset_pb2.Cursor(consumed_rows=cursor.consumed_rows, state=cursor.state)


def record_to_proto(record: OperationRecord, adapter_id: str, sequence_number: int) -> dict[str, Any]:
    """Return the common fields of GetOperationResponse and WaitOperationResponse."""
    outcome = record.result
    if record.error is not None:
        outcome = OperationFailure(adapter_id, sequence_number, record.error)
    fields: dict[str, Any] = {'state': _STATES[record.state]}
    if outcome is not None:
        fields['result'] = result_to_proto(outcome)
    if record.state is OperationState.QUEUED:
        fields['queue_position'] = record.queue_position
        fields['estimated_wait'] = duration_to_proto(record.estimated_wait)
    return fields


def _set_outcome(message: operation_result_pb2.OperationResult, outcome: domain.Outcome) -> None:
    match outcome:
        case ForwardResult():
            message.forward.CopyFrom(
                operation_result_pb2.ForwardResult(
                    loss=outcome.loss,
                    label_count=outcome.num_tokens,
                    logprobs=[tensor_to_proto(array) for array in outcome.logps],
                    metrics=outcome.metrics,
                    values=[tensor_to_proto(array) for array in outcome.values],
                    routed_experts=map(tensor_to_proto, outcome.routed_experts),
                )
            )
        case StepResult():
            message.step.CopyFrom(_step_to_proto(outcome))
        case domain.MetricResult():
            message.metric.CopyFrom(operation_result_pb2.MetricResult(values=outcome.values))
        case domain.SaveResult():
            message.save.CopyFrom(operation_result_pb2.SaveResult(**vars(outcome)))
        case domain.PublishResult():
            message.publish.CopyFrom(operation_result_pb2.PublishResult(**vars(outcome)))
        case domain.LoadResult():
            message.load.CopyFrom(operation_result_pb2.LoadResult(**vars(outcome)))
        case None:
            pass


def _step_to_proto(outcome: StepResult) -> operation_result_pb2.StepResult:
    return operation_result_pb2.StepResult(
        is_applied=outcome.is_applied,
        grad_norm=outcome.grad_norm,
        learning_rate=outcome.learning_rate,
        step_count=outcome.step_count,
        layers=[_layer_to_proto(layer) for layer in outcome.layers],
    )


def _layer_to_proto(layer: LayerHealth) -> operation_result_pb2.LayerHealth:
    return operation_result_pb2.LayerHealth(
        path=layer.path,
        grad_norm=layer.grad_norm,
        weight_norm=layer.weight_norm,
        relative_update=layer.relative_update,
        non_finite_location=layer.non_finite_location,
    )


def _receipt_to_proto(receipt: domain.Receipt) -> operation_result_pb2.Receipt:
    return operation_result_pb2.Receipt(
        token_count=receipt.token_count,
        padding_token_count=receipt.padding_token_count,
        request_bytes=receipt.request_bytes,
        device_time=duration_to_proto(receipt.device_time),
        queue_time=duration_to_proto(receipt.queue_time),
        pass_count=receipt.pass_count,
        pass_adapter_count=receipt.pass_adapter_count,
        shared_token_count=receipt.shared_token_count,
    )
