"""Compares every loss with an independent implementation of its formula, and gradients with finite differences.

Legend: R is the number of labels.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from fixtures.loss_batches import DIFFERENTIABLE, Arrays
from fixtures.loss_cases import CASES, Case, case_id
from twinkle.loss import LOSSES, TINKER_LOSSES, merge_metrics

every_case = pytest.mark.parametrize('case', CASES, ids=case_id)


def gradient_of_formula(case: Case, arrays: Arrays, name: str) -> np.ndarray:
    """Return central differences of the formula with respect to one input."""
    base = getattr(arrays, name)
    gradient = np.zeros_like(base)
    step = 1e-6
    for index in np.ndindex(base.shape):
        values = []
        for sign in (1, -1):
            moved = base.copy()
            moved[index] += sign * step
            values.append(case.formula(replace(arrays, **{name: moved}), arrays)[0])
        gradient[index] = (values[0] - values[1]) / (2 * step)
    return gradient


def test_every_registered_loss_has_a_formula():
    """Every registered loss has a reference formula."""
    assert {case.name for case in CASES} == set(LOSSES.names)


@every_case
@pytest.mark.parametrize('seed', [1, 2])
def test_loss_and_divisor_equal_the_formula(case, seed):
    """Loss and divisor in float64 equal those of the reference formula."""
    arrays = case.arrays(seed=seed)
    output = case.loss(arrays.torch())
    loss, divisor = case.formula(arrays, arrays)
    assert output['loss'].item() == pytest.approx(loss, rel=1e-9, abs=1e-12)
    assert output['num_tokens'] == divisor


@every_case
def test_gradient_equals_finite_differences_of_the_formula(case):
    """The gradient equals finite differences for every declared input, and is 0 for all others."""
    arrays, needed = case.arrays(seed=4, lengths=(3, 1, 2, 2)), ('logps', *case.loss.required_outputs, *case.reads)
    batch = arrays.torch()
    inputs = [getattr(batch, name) for name in DIFFERENTIABLE]
    gradients = torch.autograd.grad(case.loss(batch)['loss'], inputs, allow_unused=True, materialize_grads=True)
    for name, gradient in zip(DIFFERENTIABLE, gradients, strict=True):
        is_needed = name.rpartition('_')[0] in needed
        expected = gradient_of_formula(case, arrays, name) if is_needed else np.zeros(gradient.shape)
        np.testing.assert_allclose(gradient.numpy(), expected, rtol=1e-6, atol=2e-7, err_msg=name)


@every_case
def test_a_separable_loss_is_the_sum_of_its_parts(case):
    """The parts of a separable batch give its loss and divisor when added, and its metrics when merged."""
    loss, arrays = case.loss, case.arrays(seed=5)
    whole = loss(arrays.torch())
    cuts = [(0, 2, 6), (0, 4, 6), (0, 2, 4, 6)] if loss.group_size == 2 else [(0, 1, 6), (0, 3, 6), tuple(range(7))]
    if not loss.is_separable:
        return
    for cut in cuts:
        parts = [loss(arrays.part(begin, end).torch()) for begin, end in pairwise(cut)]
        assert sum(part['loss'].item() for part in parts) == pytest.approx(whole['loss'].item(), rel=1e-12)
        assert sum(part['num_tokens'] for part in parts) == whole['num_tokens']
        assert merge_metrics(parts) == pytest.approx(whole.get('metrics', {}), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    'case', [case for case in CASES if not case.loss.is_separable and case.options.get('use_batch', True)], ids=case_id
)
def test_inseparable_loss_is_not_the_sum_of_its_parts(case):
    """The loss of an inseparable batch differs from the sum over its parts."""
    loss, arrays = case.loss, case.arrays(seed=5)
    size = 3 if case.name == 'InfonceLoss' else 2
    parts = [loss(arrays.part(begin, begin + size).torch())['loss'].item() for begin in range(0, 6, size)]
    assert sum(parts) != pytest.approx(loss(arrays.torch())['loss'].item(), rel=1e-6)


@every_case
def test_labels_of_weight_0_have_no_effect(case):
    """Labels of weight 0 leave loss, divisor and metrics bitwise unchanged, for every loss except InfoNCE."""
    arrays = case.arrays(seed=8)
    if case.name == 'InfonceLoss':
        return
    weights = arrays.weights_R.copy()
    weights[[1, 5, 9]] = 0.0
    expected = case.loss(replace(arrays, weights_R=weights).torch().select(torch.tensor(weights != 0)))
    noise = {name: getattr(arrays, name) + (weights == 0) * 3.0 for name in ('logps_R', 'entropies_R', 'values_R')}
    output = case.loss(replace(arrays, weights_R=weights, **noise).torch().counting())
    assert output['loss'].item() == expected['loss'].item()
    assert (output['num_tokens'], output.get('metrics')) == (expected['num_tokens'], expected.get('metrics'))


@every_case
def test_reports_are_finite_floats_with_known_names(case):
    """Metrics are finite floats; only the metrics of the Tinker losses have a reduction suffix."""
    metrics = case.loss(case.arrays(seed=6).torch()).get('metrics', {})
    assert all(type(value) is float and np.isfinite(value) for value in metrics.values())
    if case.name in TINKER_LOSSES:
        assert list(metrics) == ['loss:sum']
    else:
        assert not any(':' in name for name in metrics)


@every_case
def test_loss_is_bitwise_reproducible(case):
    """Loss and gradient are bitwise reproducible and independent of the rows' offset in a buffer."""
    arrays = case.arrays(seed=7)
    first = bits_of(case, arrays, offset=0)
    for offset in (0, 1, 3):
        assert all(torch.equal(a, b) for a, b in zip(first, bits_of(case, arrays, offset=offset), strict=True))


def bits_of(case: Case, arrays: Arrays, *, offset: int) -> list[torch.Tensor]:
    """Return loss and gradients in float32 for inputs that start `offset` rows into a buffer."""
    batch = arrays.torch(torch.float32)
    moved = {}
    for name in DIFFERENTIABLE:
        values = getattr(batch, name).detach()
        buffer = torch.full((len(values) + offset + 2, *values.shape[1:]), 7.5)
        buffer[offset : offset + len(values)] = values
        moved[name] = buffer[offset : offset + len(values)].requires_grad_()
    loss = case.loss(replace(batch, **moved))['loss']
    return [loss, *torch.autograd.grad(loss, list(moved.values()), allow_unused=True, materialize_grads=True)]


@every_case
def test_batch_without_labels_has_no_loss(case):
    """The loss and the divisor of a batch without labels are 0, for every loss except InfoNCE."""
    if case.name == 'InfonceLoss':
        return
    output = case.loss(case.arrays(lengths=(0, 0)).torch())
    assert (output['loss'].item(), output['num_tokens']) == (0.0, 0)
    assert all(np.isfinite(value) for value in output.get('metrics', {}).values())
