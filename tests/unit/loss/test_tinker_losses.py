"""What is particular to the losses under Tinker's names; their formulas are in test_formulas."""

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
def test_options_are_tinkers_and_no_others(name):
    """Those that the API's configuration may name are taken; any other key is refused."""
    build_loss(name, **OPTIONS[name])
    with pytest.raises(InvalidComponentOptions):
        build_loss(name, epsilon=0.2)


@pytest.mark.parametrize('options', [{}, {'clip_low_threshold': 0.8}])
def test_gspo_has_no_bounds_of_its_own(options):
    """A bound that is neither given nor in the features is asked for."""
    batch = batch_of([-1.0, -2.0], advantages=[1.0, 1.0], old_logps=[-1.5, -1.5], sequence_ratio_mask=[1.0, 1.0])
    with pytest.raises(MissingStream):
        build_loss('gspo', **options)(batch)


def test_a_ratio_beyond_the_limit_weighs_no_more_than_the_limit():
    """However likely a sampled token has become, its gradient is bounded."""
    batch = batch_of([-0.1, -0.5], advantages=[1.0, 1.0], old_logps=[-30.0, -0.5])
    build_loss('stable_reinforce')(batch)['loss'].backward()
    assert batch.logps_R.grad.tolist() == [-2.0, -1.0]


def test_labels_that_were_not_sampled_have_no_penalty():
    """A log-probability of 0 stands for a token of the prompt."""
    batch = batch_of([-3.0, -0.5], advantages=[0.0, 0.0], old_logps=[0.0, -0.25])
    build_loss('stable_reinforce', kl_coeff=2.0)(batch)['loss'].backward()
    assert batch.logps_R.grad.tolist() == [0.0, -0.5]


def test_several_targets_need_weights_of_their_own():
    """Nothing is guessed."""
    batch = batch_of([-1.0], target_ids=[[1, 2]])
    batch = LossBatch(**{**vars(batch), 'candidate_logps_RK': torch.zeros(1, 2, requires_grad=True)})
    with pytest.raises(MissingStream):
        build_loss('cross_entropy')(batch)
