"""Tests of behaviour that only the losses with Tinker's names have; `test_formulas` tests their formulas.

Legend: R labels, K candidates of a label.
"""

import math

import pytest
import torch

from twinkle.component import InvalidComponentOptions
from twinkle.loss import TINKER_LOSSES, LossBatch, MissingStream, build_loss

OPTIONS = {
    'cispo': {'clip_low_threshold': 0.5, 'clip_high_threshold': 2.0},
    'cross_entropy': {},
    'dro': {'beta': 0.1},
    'gspo': {'clip_low_threshold': 0.5, 'clip_high_threshold': 2.0},
    'importance_sampling': {},
    'ppo': {'clip_low_threshold': 0.5, 'clip_high_threshold': 2.0},
    'stable_reinforce': {'kl_coeff': 0.01},
}


def batch_of(logps, **streams) -> LossBatch:
    """Return a batch of one feature."""
    count = len(logps)
    return LossBatch(
        logps_R=torch.tensor(logps, requires_grad=True),
        labels_R=torch.zeros(count, dtype=torch.int64),
        weights_R=torch.ones(count),
        features_R=torch.zeros(count, dtype=torch.int64),
        streams={name: torch.tensor(values) for name, values in streams.items()},
    )


@pytest.mark.parametrize('name', TINKER_LOSSES)
def test_only_options_of_tinker_are_accepted(name):
    """Tinker's losses accept exactly the options of Tinker's API."""
    build_loss(name, **OPTIONS[name])
    with pytest.raises(InvalidComponentOptions):
        build_loss(name, epsilon=0.2)


@pytest.mark.parametrize('options', [{}, {'clip_low_threshold': 0.8}, {'clip_high_threshold': 3.0}])
@pytest.mark.parametrize('advantage', [1.0, -1.0])
def test_gspo_clips_to_its_default_bounds(options, advantage):
    """If neither an option nor a stream sets a clip bound of gspo, the bound of `GSPOLoss` applies."""
    high, low = options.get('clip_high_threshold', 1 + 4e-4), options.get('clip_low_threshold', 1 - 3e-4)
    # The ratio of both labels is e for a positive advantage and 1/e for a negative one. Both are beyond all bounds
    # except the upper bound of 3.
    old = [-1.0 - advantage, -2.0 - advantage]
    batch = batch_of([-1.0, -2.0], advantages=[advantage] * 2, old_logps=old, sequence_ratio_mask=[1.0, 1.0])
    ratio = min(math.e, high) if advantage > 0 else max(1 / math.e, low)
    assert math.isclose(build_loss('gspo', **options)(batch)['loss'].item(), -2 * advantage * ratio, rel_tol=1e-6)


def test_importance_weight_is_limited():
    """The importance weight of `stable_reinforce` is limited to 2."""
    batch = batch_of([-0.1, -0.5], advantages=[1.0, 1.0], old_logps=[-30.0, -0.5])
    build_loss('stable_reinforce')(batch)['loss'].backward()
    assert batch.logps_R.grad.tolist() == [-2.0, -1.0]


def test_labels_that_were_not_sampled_have_no_penalty():
    """A label with an old log-probability of 0 was not sampled and has no penalty."""
    batch = batch_of([-3.0, -0.5], advantages=[0.0, 0.0], old_logps=[0.0, -0.25])
    build_loss('stable_reinforce', kl_coeff=2.0)(batch)['loss'].backward()
    assert batch.logps_R.grad.tolist() == [0.0, -0.5]


def test_several_targets_require_weights():
    """Several targets per label without target weights are refused."""
    batch = batch_of([-1.0], target_ids=[[1, 2]])
    batch = LossBatch(**{**vars(batch), 'candidate_logps_RK': torch.zeros(1, 2, requires_grad=True)})
    with pytest.raises(MissingStream):
        build_loss('cross_entropy')(batch)
