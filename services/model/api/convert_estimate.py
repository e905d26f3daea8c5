"""Questions of what a run would cost, between messages and the domain. Every check names its field."""

from services.kit.errors import InvalidField
from services.kit.rpc.fields import duration_to_proto, id_from_proto
from services.kit.rpc.weights import lora_config_from_proto
from services.model.api.convert_adapter import full_parameters_from_proto
from services.model.api.convert_config import optimizer_from_proto
from services.model.application.estimate import EstimateCommand
from services.model.domain.plan import PlanCost, TrainingPlan
from twinkle.api.model.v1 import adapter_service_pb2 as wire


def estimate_command_from_proto(request: wire.EstimateRequest) -> EstimateCommand:
    """Return what is asked.

    Raises:
        InvalidField: something is missing or out of range.
    """
    for name in ('batch_size', 'sequence_tokens'):
        if getattr(request, name) < 1:
            raise InvalidField(name, f'must be at least 1, got {getattr(request, name)}')
    label_share = request.label_share if request.HasField('label_share') else 1.0
    if not 0.0 < label_share <= 1.0:
        raise InvalidField('label_share', f'must be above 0 and at most 1, got {label_share}')
    if request.HasField('full_parameters') and request.HasField('lora_config'):
        raise InvalidField('lora_config', 'must be unset with full_parameters: the base model itself is trained')
    plan = TrainingPlan(
        lora_config=lora_config_from_proto(request.lora_config, 'lora_config'),
        full_parameters=full_parameters_from_proto(request.full_parameters, 'full_parameters')
        if request.HasField('full_parameters')
        else None,
        optimizer=optimizer_from_proto(request.optimizer, 'optimizer'),
        batch_size=request.batch_size,
        sequence_tokens=request.sequence_tokens,
        label_share=label_share,
    )
    return EstimateCommand(base_model=id_from_proto(request.base_model, 'base_model'), plan=plan)


def cost_to_proto(cost: PlanCost) -> wire.EstimateResponse:
    """Return the message of an estimate."""
    return wire.EstimateResponse(
        does_fit=cost.does_fit,
        adapter_bytes=cost.adapter_bytes,
        peak_bytes=cost.peak_bytes,
        step_time=duration_to_proto(cost.step_time),
        available_bytes=cost.available_bytes,
        parameter_count=cost.parameter_count,
    )
