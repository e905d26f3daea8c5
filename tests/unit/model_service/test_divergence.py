"""Bitwise comparison of outcomes, and the reported location of a difference."""

from dataclasses import replace

import numpy as np
import pytest

from fixtures.journals import batch_operation, forward_result, result, step_operation, step_result
from twinkle_services.model.domain.divergence import first_difference
from twinkle_services.model.domain.errors import AdapterNotReady, LossNotFinite
from twinkle_services.model.domain.result import MetricResult

FORWARD = forward_result(batch_operation(1))
STEP = step_result(step_operation(1))


def test_equal_outcomes_have_no_difference():
    """NaN equals itself; warnings, the replay mark, time metrics and the index in an error are ignored."""
    nan = replace(FORWARD, outcome=replace(FORWARD.outcome, loss=float('nan')), warnings=('slow',))
    assert first_difference(nan, replace(nan, warnings=(), is_replayed=True)) is None
    one, other = (
        result(step_operation(1), MetricResult(values={'elapsed_seconds': s, 'loss': 2.0})) for s in (1.0, 2.0)
    )
    assert first_difference(one, other) is None
    assert first_difference(LossNotFinite('ad-1', 1), LossNotFinite('ad-1', 2)) is None


def test_values_are_compared_if_recorded():
    """The outputs of a value head are compared only if they were recorded, because older journals lack them."""
    critic = replace(FORWARD, outcome=replace(FORWARD.outcome, values=[np.zeros(12, np.float32)]))
    other = replace(FORWARD, outcome=replace(FORWARD.outcome, values=[np.full(12, -0.0, np.float32)]))
    assert first_difference(FORWARD, critic) is None
    assert first_difference(critic, other).startswith('outcome.values[0][0]: recorded ')
    assert first_difference(critic, FORWARD).startswith('outcome.values: recorded ')


@pytest.mark.parametrize(
    ('change', 'path'),
    [
        ({'loss': np.nextafter(18.0, 19.0)}, 'outcome.loss'),
        ({'num_tokens': 13}, 'outcome.num_tokens'),
        (
            {'logps': [np.full(12, np.nextafter(np.float32(-1.5), np.float32(0)), np.float32)]},
            'outcome.logps[0][0]',
        ),
        ({'logps': [np.full(11, -1.5, np.float32)]}, 'outcome.logps[0]'),
        ({'logps': []}, 'outcome.logps'),
        ({'metrics': {'accuracy': -0.0}}, "outcome.metrics['accuracy']"),
    ],
)
def test_a_difference_in_the_last_bit_is_located(change, path):
    """A difference, even in the last bit or in the sign of zero, is reported with its location."""
    recorded = replace(FORWARD, outcome=replace(FORWARD.outcome, metrics={'accuracy': 0.0}))
    replayed = replace(recorded, outcome=replace(recorded.outcome, **change))
    assert first_difference(recorded, replayed).startswith(f'{path}: recorded ')


def test_errors_and_results_are_never_equal():
    """A result never equals an error, and errors of different kinds are not equal."""
    assert 'LOSS_NOT_FINITE' in first_difference(LossNotFinite('ad-1'), STEP)
    assert first_difference(STEP, AdapterNotReady('ad-1', 'x')) is not None
    assert first_difference(LossNotFinite('ad-1'), AdapterNotReady('ad-1', 'x')) is not None
    assert first_difference(STEP, FORWARD) is not None
