"""Round trips of the journal's records."""

from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from fixtures.journals import CODEC, batch_operation, make_adapter, operation
from twinkle.data_format import ForwardResult, LayerHealth, LoraConfig, StepResult
from twinkle_services.kit.errors import Internal, InvalidField
from twinkle_services.model.domain.divergence import first_difference
from twinkle_services.model.domain.errors import UndoTooFar
from twinkle_services.model.domain.result import (
    LoadResult,
    MetricResult,
    OperationResult,
    PublishResult,
    Receipt,
    SaveResult,
)
from twinkle_services.model.domain.training_config import Component, LossChoice, TrainingConfig

OUTCOMES = [
    None,
    ForwardResult(
        loss=float('nan'), num_tokens=3, logps=[np.array([-1, -np.inf, 0], np.float32)], metrics={'a': 1e-300}
    ),
    ForwardResult(loss=0.1, num_tokens=0),
    ForwardResult(loss=0.1, num_tokens=2, values=[np.array([0.5, -0.0], np.float32)]),
    StepResult(is_applied=False, learning_rate=0.0, step_count=0),
    StepResult(
        is_applied=True,
        learning_rate=1e-4,
        step_count=2**40,
        grad_norm=0.0,
        layers=(LayerHealth(path='l', grad_norm=1.0, weight_norm=0.5, relative_update=0.25),),
    ),
    MetricResult(values={'loss': float('inf')}),
    SaveResult(checkpoint_path='twinkle://a/weights/b', size_bytes=2**40, folder='/x'),
    PublishResult(version=3, digest='ab', size_bytes=0),
    LoadResult(step_count=2**40),
    LoadResult(step_count=0, consumed_train_samples=0, gradient_accumulation_steps=1),
]  # fmt: skip


@pytest.mark.parametrize('outcome', OUTCOMES, ids=lambda outcome: type(outcome).__name__)
def test_outcome_round_trip(outcome):
    """An outcome is bitwise unchanged after a round trip, including receipt and warnings."""
    receipt = Receipt(
        token_count=7,
        padding_token_count=1,
        device_time=timedelta(microseconds=1234567),
        queue_time=timedelta(milliseconds=5),
        request_bytes=99,
        pass_count=2,
        pass_adapter_count=3,
        shared_token_count=4,
    )
    original = OperationResult(
        adapter_id='ad-1', sequence_number=5, outcome=outcome, receipt=receipt, warnings=('one', 'two')
    )
    restored = CODEC.outcome_from_bytes(CODEC.outcome_to_bytes(original))
    assert first_difference(original, restored) is None
    assert (restored.receipt, restored.warnings, restored.sequence_number) == (original.receipt, original.warnings, 5)
    assert type(restored.outcome) is type(outcome)


@pytest.mark.parametrize('error', [UndoTooFar('ad-1', 5, 2), InvalidField('a.b', 'is wrong'), Internal('')])
def test_error_round_trip(error):
    """An error has the same code, reason, metadata, fields and message after a round trip."""
    restored = CODEC.outcome_from_bytes(CODEC.outcome_to_bytes(error))
    assert (restored.code, restored.reason, str(restored)) == (error.code, error.reason, str(error))
    assert (dict(restored.metadata()), restored.violations) == (dict(error.metadata()), error.violations)


def test_adapter_round_trip():
    """An adapter has the same tenant, configuration, counters, labels and times after a round trip."""
    config = TrainingConfig(
        optimizer=Component(name='AdamW', options={'lr': 1e-4, 'betas': [0.9, 0.95]}),
        lr_scheduler=Component(name='CosineWarmup', options={'warmup_steps': 5}),
        loss=LossChoice(name='GRPOLoss', options={'epsilon': 0.2}, is_mean=True),
        gradient_accumulation_steps=4,
        metrics=(Component(name='LossMetric'),),
        evaluation_metrics=(Component(name='Accuracy', options={'top': 2}),),
    )
    adapter = make_adapter(
        lora_config=LoraConfig(r=4, lora_alpha=7.5, target_modules=('q_proj',), rank_pattern={'a': 2}, seed=2**31),
        training_config=config,
        create_time=datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC),
        sequence_number=9,
        step_count=4,
        version=2,
        user_metadata={'team': 'red'},
    )
    assert CODEC.adapter_from_bytes(CODEC.adapter_to_bytes(adapter)) == adapter
    requested = make_adapter(training_config=TrainingConfig())
    assert CODEC.adapter_from_bytes(CODEC.adapter_to_bytes(requested)).training_config == TrainingConfig()


def test_operation_round_trip_keeps_its_fingerprint():
    """An operation has the same fingerprint after a round trip, so repeats are recognized after a restart."""
    for original in (batch_operation(3, length=40), operation(4, undo={'step_count': 2})):
        restored = CODEC.operation_from_bytes(original.payload)
        assert (restored.fingerprint, restored.payload, restored.request_id) == (
            original.fingerprint,
            original.payload,
            original.request_id,
        )
        assert restored.verb_name == original.verb_name
