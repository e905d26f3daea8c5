"""Tests of the errors of losses and registries: messages and pickling."""

import pickle

import pytest

from twinkle.component import InvalidComponent, InvalidComponentOptions, UnknownComponent
from twinkle.loss import InvalidLossInput, MissingOutput, MissingStream
from twinkle.processor import InvalidFeatures

REFUSALS = [
    InvalidLossInput('is wrong'),
    InvalidLossInput('is wrong', index=3),
    MissingStream('GRPOLoss', 'advantages'),
    MissingOutput('values'),
    InvalidFeatures('is empty'),
    InvalidFeatures('must be finite', index=2, field='advantages[1]'),
    UnknownComponent('loss', 'GRPO', ('GRPOLoss',)),
    InvalidComponentOptions('loss', 'GRPOLoss', 'unknown'),
    InvalidComponent('loss', 'GRPOLoss', 'the name is taken'),
]


@pytest.mark.parametrize('refusal', REFUSALS, ids=str)
def test_refusals_survive_pickling(refusal):
    """A pickled error keeps its type, message and attributes."""
    copy = pickle.loads(pickle.dumps(refusal))
    assert (type(copy), str(copy), vars(copy)) == (type(refusal), str(refusal), vars(refusal))


def test_a_refusal_of_a_feature_names_it():
    """The message of an error about a feature contains the feature's index."""
    assert str(InvalidLossInput('has no label', index=3)) == 'features[3] has no label'
