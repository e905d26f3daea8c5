"""Tests of custom losses computed by the caller and sent to the trainer as gradients.

Legend: R is the number of labels.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fixtures.loss_batches import make_arrays
from twinkle.loss import InvalidLossInput, build_loss, custom_gradients

FEATURES = [
    {'input_ids': [1, 2, 3], 'labels': [2, -100, 4]},
    {'input_ids': [5, 6], 'labels': [6, 7]},
]
LOGPS = [np.array([-1.0, 0.0, -2.0], np.float32), np.array([-0.5, -3.0], np.float32)]


def test_gradients_equal_the_derivative():
    """Gradients of a loss over several features equal its analytic derivative."""

    def squared_sum(features, logps):
        assert features is FEATURES
        total = sum(values.sum() for values in logps)
        return total.square(), {'total': total, 'count': 2}

    result = custom_gradients(squared_sum, FEATURES, LOGPS)
    assert (result.loss, result.metrics) == (42.25, {'total': -6.5, 'count': 2.0})
    assert [values.tolist() for values in result.gradients] == [[-13.0, 0.0, -13.0], [-13.0, -13.0]]
    assert all(values.dtype == np.float32 for values in result.gradients)


def test_ignored_labels_get_no_gradient():
    """Ignored labels get gradient 0 even if the loss uses them; this includes a custom ignored label."""
    result = custom_gradients(
        lambda _, logps: sum(values.exp().sum() for values in logps), FEATURES, LOGPS, ignore_index=7
    )
    assert (result.gradients[0][1], result.gradients[1][1]) == (0.0, 0.0)
    assert result.gradients[0][0] == pytest.approx(np.exp(-1.0))


def test_unused_feature_gets_zero_gradients():
    """A feature that the loss does not read gets gradients of 0; metrics are optional."""
    result = custom_gradients(lambda _, logps: logps[0].sum(), FEATURES, LOGPS)
    assert result.metrics == {}
    assert [values.tolist() for values in result.gradients] == [[1.0, 0.0, 1.0], [0.0, 0.0]]


def test_arguments_are_not_modified():
    """The caller's arrays are not modified, and gradients are computed even under `torch.no_grad`."""
    before = [values.copy() for values in LOGPS]
    with torch.no_grad():
        custom_gradients(lambda _, logps: sum((values * 2).sum() for values in logps), FEATURES, LOGPS)
    assert all(np.array_equal(a, b) for a, b in zip(before, LOGPS, strict=True))


REFUSED = {
    'no tensor': lambda _, logps: 1.0,
    'no scalar': lambda _, logps: logps[0],
    'no dependence': lambda _, logps: torch.tensor(1.0),
    'not finite': lambda _, logps: logps[0].sum() / 0.0,
    'no finite gradient': lambda _, logps: (logps[0] - logps[0].detach()).abs().sqrt().sum(),
}


@pytest.mark.parametrize('name', REFUSED)
def test_loss_without_finite_gradient_is_refused(name):
    """A loss without a finite scalar value and gradient is refused."""
    with pytest.raises(InvalidLossInput):
        custom_gradients(REFUSED[name], FEATURES, LOGPS)


def test_log_probabilities_must_fit_the_features():
    """Log-probabilities that do not match the features in number, length or labels are refused."""
    for features, logps in ((FEATURES, LOGPS[:1]), (FEATURES, [LOGPS[1], LOGPS[1]]), ([{'input_ids': [1]}], [[0.0]])):
        with pytest.raises(InvalidLossInput):
            custom_gradients(lambda _, values: values[0].sum(), features, logps)


def test_custom_gradients_replace_any_loss():
    """Custom gradients, as coefficients or negated weights, give the trainer the gradient of any loss."""
    arrays = make_arrays((3, 2), seed=3)
    batch = arrays.torch()
    (expected,) = torch.autograd.grad(build_loss('DPOLoss')(batch)['loss'], batch.logps_R)
    arrays.streams['logprob_gradients'] = (expected / batch.weights_R).numpy()
    linear = arrays.torch()
    (gradient,) = torch.autograd.grad(build_loss('WeightedLogpsLoss')(linear)['loss'], linear.logps_R)
    assert torch.allclose(gradient, expected, rtol=1e-12)
    for name in ('cross_entropy', 'CrossEntropyLoss'):
        options = {} if name == 'cross_entropy' else {'reduction': 'sum'}
        weighted = replace(make_arrays((3, 2), seed=3), streams={}).torch()
        object.__setattr__(weighted, 'weights_R', -expected)
        (gradient,) = torch.autograd.grad(build_loss(name, **options)(weighted)['loss'], weighted.logps_R)
        assert torch.allclose(gradient, expected, rtol=1e-12)
