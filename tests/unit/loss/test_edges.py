"""Tests of edge cases: clip bounds, ties, single labels, float32 overflow, malformed groups.

Legend: R labels, V vocabulary.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fixtures.loss_batches import make_arrays
from fixtures.loss_cases import CASES, case_id
from twinkle.loss import InvalidLossInput, LossBatch, build_loss

CLIPPING = ('GRPOLoss', 'PPOLoss', 'BNPOLoss', 'DRGRPOLoss', 'ppo')
"""Losses that clip the ratio to [0.8, 1.2] by default."""


def one_label(ratio, advantage, **others):
    """Return a batch of one label whose probability is `ratio` times the old probability."""
    return LossBatch(
        logps_R=torch.tensor([-1.0], dtype=torch.float64, requires_grad=True),
        labels_R=torch.tensor([3]),
        weights_R=torch.ones(1, dtype=torch.float64),
        features_R=torch.tensor([0]),
        streams={
            'old_logps': torch.tensor([-1.0 - np.log(ratio)], dtype=torch.float64),
            'advantages': torch.tensor([advantage], dtype=torch.float64),
            **{name: torch.tensor([value], dtype=torch.float64) for name, value in others.items()},
        },
    )


def gradient(name, batch, **options):
    """Return the gradient with respect to the single log-probability."""
    return torch.autograd.grad(build_loss(name, **options)(batch)['loss'], batch.logps_R)[0].item()


@pytest.mark.parametrize('name', CLIPPING)
@pytest.mark.parametrize(
    ('ratio', 'advantage', 'has_gradient'),
    [
        (1.21, 1.0, False),
        (1.19, 1.0, True),
        (0.5, 1.0, True),
        (0.79, -1.0, False),
        (0.81, -1.0, True),
        (9.0, -1.0, True),
    ],
)
def test_clipping_only_stops_updates_beyond_the_bound(name, ratio, advantage, has_gradient):
    """The gradient is 0 only where an update would move the ratio further beyond its bound."""
    expected = -ratio * advantage if has_gradient else 0.0
    assert gradient(name, one_label(ratio, advantage)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize('name', CLIPPING)
@pytest.mark.parametrize('ratio', [0.8, 1.0, 1.2])
@pytest.mark.parametrize('advantage', [-2.0, 2.0])
def test_at_a_bound_and_on_policy_the_loss_is_the_plain_one(name, ratio, advantage):
    """The loss is -r A where both objectives are equal, and on policy the gradient is not clipped."""
    batch = one_label(ratio, advantage)
    assert build_loss(name)(batch)['loss'].item() == pytest.approx(-ratio * advantage)
    if ratio == 1.0:
        assert gradient(name, batch) == pytest.approx(-advantage)


POLICY_CASES = [case for case in CASES if 'advantages' in case.loss.required_streams]


@pytest.mark.parametrize('case', POLICY_CASES, ids=case_id)
def test_zero_advantages_have_only_penalty_gradients(case):
    """Advantages of 0 give a gradient of 0 if the loss has no penalty."""
    arrays = case.arrays()
    without_advantages = replace(arrays, streams={**arrays.streams, 'advantages': np.zeros(len(arrays.logps_R))})
    off_policy = ('DROLoss', 'dro', 'stable_reinforce')
    if case.name in off_policy:
        without_advantages.streams['old_logps'] = arrays.logps_R
    batch = without_advantages.torch()
    (result,) = torch.autograd.grad(case.loss(batch)['loss'], batch.logps_R)
    assert bool((result == 0).all()) is ('beta' not in case.options or case.name in off_policy)


@pytest.mark.parametrize('name', ['GRPOLoss', 'GSPOLoss', 'SAPOLoss', 'PPOLoss', 'BNPOLoss', 'DRGRPOLoss'])
def test_without_old_log_probabilities_a_batch_is_on_policy(name):
    """A loss without `old_logps` is bitwise the same as with old log-probabilities equal to the current ones."""
    arrays = make_arrays((2, 3))
    results = []
    for streams in ({}, {'old_logps': arrays.logps_R}):
        batch = replace(arrays, streams={'advantages': arrays.streams['advantages'], **streams}).torch()
        output = build_loss(name)(batch)
        results.append([output['loss'], *torch.autograd.grad(output['loss'], batch.logps_R)])
        assert (output['metrics']['ratio'], output['metrics']['approx_kl']) == (1.0, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_clip_fraction_counts_clipped_labels():
    """`clip_fraction` counts the labels whose gradient was clipped, and losses without clipping omit it."""
    batches = [one_label(1.5, 1.0), one_label(1.5, -1.0)]
    reports = [build_loss('GRPOLoss')(batch)['metrics'] for batch in batches]
    assert [report['clip_fraction'] for report in reports] == [1.0, 0.0]
    assert reports[0]['ratio'] == pytest.approx(1.5)
    assert reports[0]['approx_kl'] == pytest.approx(0.5 - np.log(1.5))
    assert 'clip_fraction' not in build_loss('SAPOLoss')(batches[0])['metrics']


@pytest.mark.parametrize('name', ['GRPOLoss', 'GSPOLoss', 'SAPOLoss', 'CISPOLoss', 'ImportanceSamplingLoss'])
@pytest.mark.parametrize('old', [-500.0, -0.0])
@pytest.mark.parametrize('advantage', [-1.0, 1.0])
def test_overflowing_ratio_stays_finite(name, old, advantage):
    """Ratios of e^495 and e^-495 give a finite loss and gradient in float32."""
    logps = torch.tensor([-5.0 if old else -495.0, -1.0], requires_grad=True)
    batch = LossBatch(
        logps_R=logps,
        labels_R=torch.tensor([1, 2]),
        weights_R=torch.ones(2),
        features_R=torch.tensor([0, 0]),
        streams={'old_logps': torch.tensor([old, -1.0]), 'advantages': torch.tensor([advantage, advantage])},
    )
    output = build_loss(name)(batch)
    (result,) = torch.autograd.grad(output['loss'], logps)
    assert output['loss'].isfinite()
    assert result.isfinite().all()


def test_overflowing_margin_stays_finite():
    """Log-ratios of thousands with either sign give finite preference losses and gradients in float32."""
    for name in ('DPOLoss', 'SimPOLoss', 'CPOLoss', 'ORPOLoss'):
        for sign in (1.0, -1.0):
            logps = torch.tensor([-5000.0, -0.0][:: int(sign)], requires_grad=True)
            batch = LossBatch(
                logps_R=logps,
                labels_R=torch.tensor([1, 2]),
                weights_R=torch.ones(2),
                features_R=torch.tensor([0, 1]),
                streams={'ref_logps': torch.zeros(2)},
            )
            loss = build_loss(name)(batch)['loss']
            assert loss.isfinite()
            assert torch.autograd.grad(loss, logps)[0].isfinite().all()


@pytest.mark.parametrize('name', ['DPOLoss', 'SimPOLoss', 'CPOLoss', 'ORPOLoss'])
@pytest.mark.parametrize(('lengths', 'index'), [((2, 0), 1), ((0, 2), 0), ((2, 2, 0, 1), 2), ((1, 1, 1), 3)])
def test_incomplete_pair_is_refused(name, lengths, index):
    """A pair whose responses do not both have labels is refused with an error that contains the feature's index."""
    with pytest.raises(InvalidLossInput) as refusal:
        build_loss(name)(make_arrays(lengths).torch())
    assert refusal.value.index == index


def test_equal_responses_have_loss_log_2():
    """A preference loss without a margin is log 2, and its reward accuracy is 0."""
    arrays = replace(make_arrays((1, 1)), logps_R=np.array([-1.0, -1.0]), weights_R=np.ones(2))
    arrays.streams['ref_logps'] = np.array([-2.0, -2.0])
    output = build_loss('DPOLoss')(arrays.torch())
    assert output['loss'].item() == pytest.approx(np.log(2))
    assert output['metrics'] == pytest.approx(
        {'chosen_reward': 0.1, 'rejected_reward': 0.1, 'reward_margin': 0.0, 'reward_accuracy': 0.0}
    )


REFUSED_GROUPS = {
    'two labels': (make_arrays((2, 1, 1)), [1, 0, 0, 0], 0),
    'no label': (make_arrays((1, 1, 0)), [1, 0], 2),
    'unknown label': (make_arrays((1, 1, 1)), [1, 0, 7], 2),
    'no leading anchor': (make_arrays((1, 1, 1)), [0, 1, 0], 0),
    'no positive': (make_arrays((1, 1, 1)), [1, 0, 1], 2),
    'no contrast': (make_arrays((1, 1)), [1, 0], 0),
}
"""Batch, labels, and index of the feature that the error names."""


@pytest.mark.parametrize('name', REFUSED_GROUPS)
def test_malformed_groups_are_refused(name):
    """Embedding batches that are not ordered as anchor, positive, negatives are refused with the feature's index."""
    arrays, labels, index = REFUSED_GROUPS[name]
    with pytest.raises(InvalidLossInput) as refusal:
        build_loss('InfonceLoss')(replace(arrays, labels_R=np.array(labels)).torch())
    assert refusal.value.index == index


def test_missing_negatives_are_refused():
    """InfoNCE is refused if no negatives remain: with `hard_negatives`, or without the rest of the batch."""
    arrays = replace(make_arrays((1, 1, 1, 1)), labels_R=np.array([1, 0, 1, 0]))
    build_loss('InfonceLoss')(arrays.torch())
    for options in ({'hard_negatives': 2}, {'use_batch': False}):
        with pytest.raises(InvalidLossInput):
            build_loss('InfonceLoss', **options)(arrays.torch())


def test_single_candidate_is_refused():
    """A teacher with a single candidate per label is refused."""
    arrays = make_arrays((2,))
    arrays.streams['teacher_topk_logps'] = arrays.streams['teacher_topk_logps'][:, :1]
    with pytest.raises(InvalidLossInput):
        build_loss('GKDLoss')(arrays.torch())


def test_equal_student_and_teacher_have_no_loss():
    """The divergence of equal distributions is 0, and so is its gradient."""
    arrays = make_arrays((3,))
    arrays.streams['teacher_logits'] = arrays.logits_RV + 2.5
    for beta in (0.0, 0.4, 1.0):
        batch = arrays.torch()
        loss = build_loss('GKDLoss', beta=beta, teacher='full')(batch)['loss']
        assert loss.item() == pytest.approx(0.0, abs=1e-12)
        assert torch.autograd.grad(loss, batch.logits_RV)[0].abs().max() < 1e-12


def test_clip_bounds_of_features_override_options():
    """Tinker's clip bounds in the features override those of the options."""
    for name in ('ppo', 'cispo'):
        narrow = one_label(2.0, 1.0, clip_low_threshold=0.9, clip_high_threshold=1.1)
        configured = build_loss(name, clip_low_threshold=0.9, clip_high_threshold=1.1)(one_label(2.0, 1.0))
        assert build_loss(name)(narrow)['loss'].item() == configured['loss'].item()


def test_a_datum_without_marked_labels_has_no_ratio():
    """Tinker's gspo refuses a datum whose mask is 0 at all labels, with its index."""
    arrays = make_arrays((2, 2))
    arrays.streams['sequence_ratio_mask'] = np.array([1.0, 0.0, 0.0, 0.0])
    with pytest.raises(InvalidLossInput) as refusal:
        build_loss('gspo', clip_low_threshold=0.9, clip_high_threshold=1.1)(arrays.torch())
    assert refusal.value.index == 1
