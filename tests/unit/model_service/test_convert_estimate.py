"""Conversion of estimate requests and results."""

from datetime import timedelta

import pytest

from twinkle.api.model.v1 import adapter_service_pb2 as wire
from twinkle_services.kit.errors import InvalidField
from twinkle_services.model.api.convert_adapter import cost_to_proto, estimate_request_from_proto
from twinkle_services.model.domain.plan import PlanCost

GOOD = {'base_model': 'tiny', 'batch_size': 4, 'sequence_tokens': 128}


def test_unset_fields_have_the_defaults_of_the_contract():
    """Unset fields select LoRA of rank 8, AdamW, and a label share of 1."""
    plan = estimate_request_from_proto(wire.EstimateRequest(**GOOD)).plan
    assert (plan.lora_config.r, plan.optimizer.name, plan.label_share) == (8, 'AdamW', 1.0)
    assert plan.full_parameters is None


def test_requested_plan_is_converted():
    """Rank, optimizer, label share and full parameters are converted."""
    request = wire.EstimateRequest(
        **GOOD, lora_config={'lora_rank': 4}, optimizer={'name': 'SGD', 'learning_rate': 0.5}, label_share=0.25
    )
    command = estimate_request_from_proto(request)
    assert command.base_model == 'tiny'
    assert (command.plan.batch_size, command.plan.sequence_tokens, command.plan.label_share) == (4, 128, 0.25)
    assert (command.plan.lora_config.r, command.plan.optimizer.options) == (4, {'lr': 0.5})
    full = estimate_request_from_proto(wire.EstimateRequest(**GOOD, full_parameters={}))
    assert full.plan.full_parameters == ()


@pytest.mark.parametrize(
    ('fields', 'field'),
    [
        ({'base_model': ''}, 'base_model'),
        ({'batch_size': 0}, 'batch_size'),
        ({'sequence_tokens': -1}, 'sequence_tokens'),
        ({'label_share': 0.0}, 'label_share'),
        ({'label_share': 1.5}, 'label_share'),
        ({'label_share': float('nan')}, 'label_share'),
        ({'lora_config': {}, 'full_parameters': {}}, 'lora_config'),
        ({'lora_config': {'lora_rank': 0}}, 'lora_config.lora_rank'),
        ({'optimizer': {'learning_rate': -1.0}}, 'optimizer.learning_rate'),
    ],
)
def test_an_impossible_plan_is_refused(fields, field):
    """A plan that cannot be run is refused with the path of its field."""
    with pytest.raises(InvalidField) as refusal:
        estimate_request_from_proto(wire.EstimateRequest(**{**GOOD, **fields}))
    assert refusal.value.field == field


@pytest.mark.parametrize('available', [99, 100])
def test_estimated_cost_is_converted(available):
    """All values are converted; a plan fits if its peak memory is at most the available memory."""
    cost = PlanCost(
        parameter_count=7,
        adapter_bytes=28,
        peak_bytes=100,
        step_time=timedelta(seconds=1.5),
        available_bytes=available,
        is_measured_under_load=True,
    )
    message = cost_to_proto(cost)
    assert message.does_fit is (available == 100)
    assert (message.parameter_count, message.adapter_bytes, message.peak_bytes) == (7, 28, 100)
    assert message.is_measured_under_load
    assert message.step_time.ToTimedelta() == timedelta(seconds=1.5)
