"""Tests of off-policy corrections: values computed by hand, and refused options."""

import math

import pytest
import torch

from fixtures.loss_batches import declared, make_arrays
from twinkle.component import InvalidComponentOptions
from twinkle.loss import MissingStream, build_loss
from twinkle.loss.off_policy import masked_weights, truncated_weights

LOG_K = torch.tensor([math.log(k) for k in (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)], dtype=torch.float64)
"""Logarithms of k, the trainer's probability of a token divided by the sampler's probability."""


def test_truncation_bounds_large_weights_and_keeps_small_ones():
    """Truncated weights are min(k, high)."""
    assert truncated_weights(LOG_K, high=2.0).tolist() == pytest.approx([0.25, 0.5, 1.0, 2.0, 2.0, 2.0])


def test_masking_drops_both_ends_and_keeps_the_middle():
    """Masked weights are k within the bounds and 0 outside."""
    assert masked_weights(LOG_K[2:], low=0.5, high=5.0).tolist() == pytest.approx([1.0, 2.0, 4.0, 0.0])
    assert masked_weights(LOG_K[:1], low=0.5, high=5.0).tolist() == [0.0]


@pytest.mark.parametrize('kind', ['truncated', 'masked'])
def test_equal_engines_need_no_correction(kind):
    """A correction does not change the loss when sampler and trainer have equal probabilities."""
    plain, corrected = build_loss('GRPOLoss'), build_loss('GRPOLoss', correction=kind)
    arrays = make_arrays((3, 2, 4), seed=3)
    arrays.streams['sampler_logps'] = arrays.streams['old_logps']
    one, other = plain(declared(arrays, plain).torch()), corrected(declared(arrays, corrected).torch())
    assert torch.equal(one['loss'], other['loss'])
    assert other['metrics']['sampler_kl'] == 0.0


@pytest.mark.parametrize('name', ['BNPOLoss', 'CISPOLoss', 'DRGRPOLoss', 'GSPOLoss', 'PPOLoss', 'SAPOLoss'])
def test_a_correction_of_zero_weights_leaves_no_loss(name):
    """Every policy loss is 0 when the correction drops all labels."""
    loss = build_loss(name, correction='masked', correction_high=5.0)
    arrays = make_arrays((3, 2), seed=4)
    arrays.streams['sampler_logps'] = arrays.streams['old_logps'] - 4.0
    output = loss(declared(arrays, loss).torch())
    assert output['loss'].item() == 0.0
    assert output['metrics']['corrected_fraction'] == 1.0


def test_correction_requires_sampler_logps():
    """A corrected loss requires the stream `sampler_logps` and is refused without it."""
    loss = build_loss('GRPOLoss', correction='truncated')
    assert 'sampler_logps' in loss.required_streams
    plain = declared(make_arrays((2,)), build_loss('GRPOLoss'))
    with pytest.raises(MissingStream):
        loss(plain.torch())


@pytest.mark.parametrize(
    'options',
    [
        {'correction': 'icepop'},
        {'correction_high': 2.0},
        {'correction': 'truncated', 'correction_low': 0.5},
        {'correction': 'truncated', 'correction_high': 0.0},
        {'correction': 'masked', 'correction_low': 2.0, 'correction_high': 1.0},
        {'corrections': 'masked'},
    ],
)
def test_invalid_options_are_refused(options):
    """Unknown names, bounds out of order and bounds without effect are refused."""
    with pytest.raises(InvalidComponentOptions):
        build_loss('GRPOLoss', **options)
