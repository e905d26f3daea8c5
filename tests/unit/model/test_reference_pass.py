"""Tests of forward-only batches without the streams of the adapter's loss, and of the streams that they compute."""

import numpy as np
import pytest

from twinkle.data_format import LoraConfig
from twinkle.loss import MissingStream
from twinkle.model.engine import ForwardOptions

FEATURES = [
    {'input_ids': [3, 4, 5, 6], 'labels': [-100, 5, 6, 7]},
    {'input_ids': [3, 4, 9], 'labels': [-100, 9, 10]},
]


@pytest.mark.parametrize('loss', ['DPOLoss', 'GRPOLoss', 'ppo', 'GKDLoss', 'SoftCrossEntropyLoss', 'PPOValueLoss'])
def test_forward_only_needs_no_stream(engine, loss):
    """A forward-only batch without the loss's streams returns log-probabilities and a warning; training is refused."""
    for name in ('plain', 'own'):
        engine.create_adapter(name, LoraConfig(r=4, target_modules='all-linear', seed=0))
    engine.set_loss('own', loss)
    expected = engine.forward_only('plain', FEATURES)
    result = engine.forward_only('own', FEATURES)
    assert all(np.array_equal(a, b) for a, b in zip(result.logps, expected.logps, strict=True))
    assert (result.loss, result.metrics) == (0.0, {})
    required = engine.adapter('own').loss.required_streams
    assert [name for name in required if any(name in warning for warning in result.warnings)] == list(required)
    assert engine.calculate_metric('own', is_training=False) == {}
    with pytest.raises(MissingStream):
        engine.forward_backward('own', FEATURES)


def test_preference_against_reference_logps(engine):
    """DPO with reference log-probabilities of the base model starts at a loss of log 2, which training lowers."""
    engine.create_adapter('own', LoraConfig(r=4, target_modules='all-linear', seed=0))
    engine.set_loss('own', 'DPOLoss', beta=1.0)
    reference = engine.forward_only('own', FEATURES, options=ForwardOptions(is_adapter_disabled=True))
    pairs = [{**feature, 'ref_logps': own} for feature, own in zip(FEATURES, reference.logps, strict=True)]
    first = engine.forward_backward('own', pairs)
    assert first.loss == pytest.approx(np.log(2), rel=1e-5)
    assert first.warnings == ()
    engine.set_optimizer('own', 'SGD', lr=0.1)
    for _ in range(5):
        engine.forward_backward('own', pairs)
        engine.clip_grad_and_step('own')
    last = engine.forward_only('own', pairs)
    assert last.loss < first.loss
    assert last.metrics['reward_margin'] > 0.0
