"""Serializes the journal's records as protobuf messages."""

from collections.abc import Callable
from datetime import UTC
from typing import Any, cast

from twinkle.api.model.v1 import adapter_service_pb2, operation_pb2
from twinkle.api.model.v1 import operation_result_pb2 as wire
from twinkle.data_format import ForwardResult, LayerHealth, StepResult, base_model_id
from twinkle_services.kit.errors import DomainError
from twinkle_services.kit.rpc.status import error_from_status
from twinkle_services.kit.rpc.tensors import tensor_data_from_proto
from twinkle_services.kit.weights.wire import lora_config_from_proto
from twinkle_services.model.api.convert_config import training_config_from_proto
from twinkle_services.model.api.convert_features import check_example_count, cursor_from_proto
from twinkle_services.model.api.convert_operation import operation_from_proto
from twinkle_services.model.api.convert_result import (
    adapter_to_proto,
    cursor_to_proto,
    metrics_to_proto,
    result_to_proto,
)
from twinkle_services.model.application.train_stream import OperationFailure
from twinkle_services.model.domain import result as domain
from twinkle_services.model.domain.adapter import Adapter
from twinkle_services.model.domain.loader_batch import LoadedBatch
from twinkle_services.model.domain.operation import Operation
from twinkle_services.model.domain.step_metrics import MetricReport, StepMetrics


class ProtoRecordCodec:
    """Implements `twinkle_services.model.ports.RecordCodec`."""

    def __init__(self, *, vocabulary_size: int, max_batch_examples: int | None = None) -> None:
        """Create the codec.

        Args:
            vocabulary_size: Upper bound of token ids, exclusive.
            max_batch_examples: Maximum number of examples of a fetched batch; None for no limit.
        """
        self._vocabulary_size = vocabulary_size
        self._max_batch_examples = max_batch_examples

    def operation_from_bytes(self, payload: bytes) -> Operation:
        message = operation_pb2.Operation.FromString(payload)
        return operation_from_proto(message, 'operation', vocabulary_size=self._vocabulary_size)

    def with_batch(self, operation: Operation, loaded: LoadedBatch) -> Operation:
        message = operation_pb2.Operation.FromString(operation.payload)
        batch = getattr(message, message.WhichOneof('verb') or '').batch.loader.loaded
        batch.features.ParseFromString(loaded.content)
        if self._max_batch_examples is not None:
            field = f'operation.{message.WhichOneof("verb")}.batch.loader.loaded.features.features'
            check_example_count(batch.features.features, field, limit=self._max_batch_examples)
        batch.next_cursor.CopyFrom(cursor_to_proto(loaded.next_cursor))
        return operation_from_proto(message, 'operation', vocabulary_size=self._vocabulary_size)

    def outcome_to_bytes(self, outcome: domain.OperationResult | DomainError) -> bytes:
        result = OperationFailure('', 0, outcome) if isinstance(outcome, DomainError) else outcome
        return result_to_proto(result).SerializeToString(deterministic=True)

    def outcome_from_bytes(self, data: bytes) -> domain.OperationResult | DomainError:
        message = wire.OperationResult.FromString(data)
        return error_from_status(message.error) if message.HasField('error') else result_from_proto(message)

    def adapter_to_bytes(self, adapter: Adapter) -> bytes:
        message = adapter_service_pb2.WatchAdaptersResponse(
            tenant_id=adapter.tenant_id, adapter=adapter_to_proto(adapter), metrics=metrics_to_proto(adapter.metrics)
        )
        return message.SerializeToString(deterministic=True)

    def adapter_from_bytes(self, data: bytes) -> Adapter:
        event = adapter_service_pb2.WatchAdaptersResponse.FromString(data)
        message = event.adapter
        return Adapter(
            adapter_id=message.adapter_id,
            tenant_id=event.tenant_id,
            base_model=base_model_id(message.base_model),
            lora_config=lora_config_from_proto(message.lora_config, 'lora_config'),
            training_config=training_config_from_proto(message.training_config, 'training_config'),
            parameter_count=message.parameter_count,
            full_parameters=tuple(message.full_parameters.target_modules)
            if message.HasField('full_parameters')
            else None,
            create_time=message.create_time.ToDatetime(tzinfo=UTC),
            update_time=message.update_time.ToDatetime(tzinfo=UTC),
            sequence_number=message.sequence_number,
            step_count=message.step_count,
            trained_token_count=message.trained_token_count,
            version=message.version,
            user_metadata=dict(message.user_metadata),
            session_id=message.session_id,
            checkpoint_path=message.checkpoint_path,
            has_lease=message.has_lease,
            session_end_time=message.session_end_time.ToDatetime(tzinfo=UTC)
            if message.HasField('session_end_time')
            else None,
            metrics=_metrics_from_proto(event.metrics),
        )


def _metrics_from_proto(message: adapter_service_pb2.AdapterMetrics) -> StepMetrics:
    reports = (
        MetricReport(sequence_number=report.sequence_number, step=report.step, values=dict(report.values))
        for report in message.reports
    )
    return StepMetrics(reports=tuple(reports), totals=dict(message.totals))


def result_from_proto(message: wire.OperationResult) -> domain.OperationResult:
    receipt = message.receipt
    return domain.OperationResult(
        adapter_id=message.adapter_id,
        sequence_number=message.sequence_number,
        outcome=_outcome(message),
        receipt=domain.Receipt(
            token_count=receipt.token_count,
            padding_token_count=receipt.padding_token_count,
            device_time=receipt.device_time.ToTimedelta(),
            queue_time=receipt.queue_time.ToTimedelta(),
            request_bytes=receipt.request_bytes,
            pass_count=receipt.pass_count,
            pass_adapter_count=receipt.pass_adapter_count,
            shared_token_count=receipt.shared_token_count,
        ),
        warnings=tuple(message.warnings),
        is_replayed=message.is_replayed,
        next_cursor=cursor_from_proto(message.next_cursor) if message.HasField('next_cursor') else None,
    )


def _outcome(message: wire.OperationResult) -> domain.Outcome:
    name = message.WhichOneof('outcome')
    return None if name is None else _OUTCOMES[name](getattr(message, name))


def _forward(message: wire.ForwardResult) -> ForwardResult:
    # `tensor_from_proto` would reject infinite values, which a recorded result may contain.
    return ForwardResult(
        loss=message.loss,
        num_tokens=message.label_count,
        logps=[tensor_data_from_proto(tensor, 'logprobs').to_numpy() for tensor in message.logprobs],
        metrics=dict(message.metrics),
        values=[tensor_data_from_proto(tensor, 'values').to_numpy() for tensor in message.values],
        routed_experts=[
            tensor_data_from_proto(tensor, 'routed_experts').to_numpy() for tensor in message.routed_experts
        ],
    )


def _step(message: wire.StepResult) -> StepResult:
    return StepResult(
        is_applied=message.is_applied,
        learning_rate=message.learning_rate,
        step_count=message.step_count,
        grad_norm=message.grad_norm if message.HasField('grad_norm') else None,
        layers=tuple(map(_layer, message.layers)),
    )


def _layer(message: wire.LayerHealth) -> LayerHealth:
    return LayerHealth(
        path=message.path,
        grad_norm=message.grad_norm,
        weight_norm=message.weight_norm,
        relative_update=message.relative_update,
        non_finite_location=message.non_finite_location,
    )


def _load(message: wire.LoadResult) -> domain.LoadResult:
    optional = ('consumed_train_samples', 'gradient_accumulation_steps')
    counters = {name: getattr(message, name) for name in optional if message.HasField(name)}
    return domain.LoadResult(step_count=message.step_count, **counters)


def _fields(message: Any) -> dict[str, Any]:
    """Return all fields of a message, which must be scalar, including those with default values."""
    return {name: getattr(message, name) for name in cast(list[str], list(message.DESCRIPTOR.fields_by_name))}


_OUTCOMES: dict[str, Callable[[Any], domain.Outcome]] = {
    'forward': _forward,
    'step': _step,
    'metric': lambda message: domain.MetricResult(values=dict(message.values)),
    'save': lambda message: domain.SaveResult(**_fields(message)),
    'publish': lambda message: domain.PublishResult(**_fields(message)),
    'load': _load,
}
"""Converters of outcomes by field name; `outcome_from_bytes` converts errors."""
