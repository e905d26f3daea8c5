"""Losses, one by one, and how they are asked for."""

import pytest
import torch

from twinkle.component import InvalidComponentOptions, UnknownComponent
from twinkle.data_format import LossOutput
from twinkle.loss import LOSSES, CrossEntropyLoss, Loss, LossBatch, build_loss


def batch_of(logps, features=None):
    """Return a batch of labels with these log-probabilities and weights 1, 2, ..."""
    count = len(logps)
    return LossBatch(
        logps_R=torch.tensor(logps, requires_grad=True),
        labels_R=torch.arange(count),
        weights_R=torch.arange(1.0, count + 1),
        features_R=torch.tensor(features or [0] * count),
    )


@pytest.mark.parametrize(('reduction', 'num_tokens'), [('mean', 3), ('sum', 0)])
def test_cross_entropy_is_the_weighted_sum(reduction, num_tokens):
    """The loss is a sum; the reduction says what the gradient is divided by at the step."""
    batch = batch_of([-1.0, -2.0, -4.0])
    output = CrossEntropyLoss(reduction=reduction)(batch)
    assert output['loss'].item() == 1.0 + 4.0 + 12.0
    assert output['num_tokens'] == num_tokens
    output['loss'].backward()
    assert batch.logps_R.grad.tolist() == [-1.0, -2.0, -3.0]


def test_feature_sums():
    """Values add up within each feature that has labels."""
    batch = batch_of([1.0, 2.0, 3.0], features=[0, 2, 2])
    assert batch.feature_sum(batch.logps_R).tolist() == [1.0, 5.0]


def test_losses_by_name_class_instance_and_function():
    """Each way to ask gives a loss."""

    class Own(Loss):
        def __call__(self, batch):
            return LossOutput(loss=batch.logps_R.sum(), num_tokens=0)

    assert build_loss('CrossEntropyLoss', reduction='sum').reduction == 'sum'
    assert isinstance(build_loss(Own), Own)
    assert build_loss(own := Own()) is own
    function = build_loss(lambda batch: LossOutput(loss=batch.logps_R.sum(), num_tokens=0))
    assert (function(batch_of([1.0]))['loss'].item(), function.is_separable) == (1.0, False)


def test_what_does_not_exist_is_refused():
    """Names, options and values; the refusal says what there is."""
    with pytest.raises(UnknownComponent) as unknown:
        build_loss('GRPO')
    assert unknown.value.known == LOSSES.names
    for arguments in ({'beta': 1.0}, {'reduction': 'median'}):
        with pytest.raises(InvalidComponentOptions):
            build_loss('CrossEntropyLoss', **arguments)
    with pytest.raises(InvalidComponentOptions):
        build_loss(CrossEntropyLoss(), reduction='sum')
    with pytest.raises(InvalidComponentOptions):
        build_loss(lambda batch: batch, beta=1)
