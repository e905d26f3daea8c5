"""Losses at their edges: clip bounds, ties, single labels, numbers no float32 holds, ill-formed groups."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fixtures.loss_batches import make_arrays
from fixtures.loss_cases import CASES, case_id
from twinkle.loss import InvalidLossInput, LossBatch, build_loss

CLIPPING = ('GRPOLoss', 'PPOLoss', 'BNPOLoss', 'DRGRPOLoss', 'ppo')


def one_label(ratio, advantage, **others):
    """Return a batch of one label whose probability is `ratio` times the old one."""
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
    """Return the gradient by the one log-probability."""
    return torch.autograd.grad(build_loss(name, **options)(batch)['loss'], batch.logps_R)[0].item()


@pytest.mark.parametrize('name', CLIPPING)
@pytest.mark.parametrize(
    ('ratio', 'advantage', 'is_alive'),
    [
        (1.21, 1.0, False),
        (1.19, 1.0, True),
        (0.5, 1.0, True),
        (0.79, -1.0, False),
        (0.81, -1.0, True),
        (9.0, -1.0, True),
    ],
)
def test_the_clip_stops_only_what_would_go_further(name, ratio, advantage, is_alive):
    """On either side of a bound and for either sign, the gradient is that of the ratio or none."""
    expected = -ratio * advantage if is_alive else 0.0
    assert gradient(name, one_label(ratio, advantage)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize('name', CLIPPING)
@pytest.mark.parametrize('ratio', [0.8, 1.0, 1.2])
@pytest.mark.parametrize('advantage', [-2.0, 2.0])
def test_at_a_bound_and_on_policy_the_loss_is_the_plain_one(name, ratio, advantage):
    """Where both objectives tie, the value is -r A; on policy the gradient is whole."""
    batch = one_label(ratio, advantage)
    assert build_loss(name)(batch)['loss'].item() == pytest.approx(-ratio * advantage)
    if ratio == 1.0:
        assert gradient(name, batch) == pytest.approx(-advantage)


POLICIES = [case for case in CASES if 'advantages' in case.loss.required_streams]


@pytest.mark.parametrize('case', POLICIES, ids=case_id)
def test_without_advantages_nothing_is_learned_but_penalties(case):
    """Advantages of 0 leave no gradient where the loss has no penalty."""
    arrays = case.arrays()
    still = replace(arrays, streams={**arrays.streams, 'advantages': np.zeros(len(arrays.logps_R))})
    at_rest = ('DROLoss', 'dro', 'stable_reinforce')
    if case.name in at_rest:
        still.streams['old_logps'] = arrays.logps_R
    batch = still.torch()
    (result,) = torch.autograd.grad(case.loss(batch)['loss'], batch.logps_R)
    assert bool((result == 0).all()) is ('beta' not in case.options or case.name in at_rest)


@pytest.mark.parametrize('name', ['GRPOLoss', 'GSPOLoss', 'SAPOLoss', 'PPOLoss', 'BNPOLoss', 'DRGRPOLoss'])
def test_without_old_log_probabilities_a_batch_is_on_policy(name):
    """The value and gradient are those of old log-probabilities equal to the present ones."""
    arrays = make_arrays((2, 3))
    results = []
    for streams in ({}, {'old_logps': arrays.logps_R}):
        batch = replace(arrays, streams={'advantages': arrays.streams['advantages'], **streams}).torch()
        output = build_loss(name)(batch)
        results.append([output['loss'], *torch.autograd.grad(output['loss'], batch.logps_R)])
        assert (output['metrics']['ratio'], output['metrics']['approx_kl']) == (1.0, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_reports_of_a_policy_count_what_was_clipped():
    """Half of the labels beyond a bound that holds them: half is reported."""
    batches = [one_label(1.5, 1.0), one_label(1.5, -1.0)]
    reports = [build_loss('GRPOLoss')(batch)['metrics'] for batch in batches]
    assert [report['clip_fraction'] for report in reports] == [1.0, 0.0]
    assert reports[0]['ratio'] == pytest.approx(1.5)
    assert reports[0]['approx_kl'] == pytest.approx(0.5 - np.log(1.5))
    assert 'clip_fraction' not in build_loss('SAPOLoss')(batches[0])['metrics']


@pytest.mark.parametrize('name', ['GRPOLoss', 'GSPOLoss', 'SAPOLoss', 'CISPOLoss', 'ImportanceSamplingLoss'])
@pytest.mark.parametrize('old', [-500.0, -0.0])
@pytest.mark.parametrize('advantage', [-1.0, 1.0])
def test_a_ratio_no_float_holds_does_not_spoil_the_batch(name, old, advantage):
    """Ratios of e^495 and e^-495 leave loss and gradient finite in float32."""
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


def test_a_margin_no_exponential_holds_leaves_preferences_finite():
    """Log-ratios of thousands, either way, in float32."""
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
def test_a_pair_with_one_side_is_refused_by_place(name, lengths, index):
    """Labels on one of both only, or an odd feature at the end."""
    with pytest.raises(InvalidLossInput) as refusal:
        build_loss(name)(make_arrays(lengths).torch())
    assert refusal.value.index == index


def test_equal_responses_are_a_coin_toss():
    """With no margin the preference loss is log 2 and half of nothing is won."""
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
    'another mark': (make_arrays((1, 1, 1)), [1, 0, 7], 2),
    'no anchor first': (make_arrays((1, 1, 1)), [0, 1, 0], 0),
    'no positive': (make_arrays((1, 1, 1)), [1, 0, 1], 2),
    'no contrast': (make_arrays((1, 1)), [1, 0], 0),
}


@pytest.mark.parametrize('name', REFUSED_GROUPS)
def test_groups_that_are_none_are_refused_by_place(name):
    """An embedding batch that is not anchor, positive, negatives, and so on."""
    arrays, labels, index = REFUSED_GROUPS[name]
    with pytest.raises(InvalidLossInput) as refusal:
        build_loss('InfonceLoss')(replace(arrays, labels_R=np.array(labels)).torch())
    assert refusal.value.index == index


def test_negatives_are_asked_for_only_where_there_are_some():
    """`hard_negatives` of an anchor without any, and no use of the batch without any, leave nothing to learn."""
    arrays = replace(make_arrays((1, 1, 1, 1)), labels_R=np.array([1, 0, 1, 0]))
    build_loss('InfonceLoss')(arrays.torch())
    for options in ({'hard_negatives': 2}, {'use_batch': False}):
        with pytest.raises(InvalidLossInput):
            build_loss('InfonceLoss', **options)(arrays.torch())


def test_one_candidate_is_no_distribution():
    """A teacher's single likeliest token would always agree with the student's."""
    arrays = make_arrays((2,))
    arrays.streams['teacher_topk_logps'] = arrays.streams['teacher_topk_logps'][:, :1]
    with pytest.raises(InvalidLossInput):
        build_loss('GKDLoss')(arrays.torch())


def test_a_student_that_equals_its_teacher_has_nothing_to_learn():
    """Every divergence is 0 there, and so is its gradient."""
    arrays = make_arrays((3,))
    arrays.streams['teacher_logits'] = arrays.logits_RV + 2.5
    for beta in (0.0, 0.4, 1.0):
        batch = arrays.torch()
        loss = build_loss('GKDLoss', beta=beta, teacher='full')(batch)['loss']
        assert loss.item() == pytest.approx(0.0, abs=1e-12)
        assert torch.autograd.grad(loss, batch.logits_RV)[0].abs().max() < 1e-12


def test_thresholds_may_come_with_the_labels():
    """Tinker's bounds of a datum override those of the configuration."""
    for name in ('ppo', 'cispo'):
        narrow = one_label(2.0, 1.0, clip_low_threshold=0.9, clip_high_threshold=1.1)
        configured = build_loss(name, clip_low_threshold=0.9, clip_high_threshold=1.1)(one_label(2.0, 1.0))
        assert build_loss(name)(narrow)['loss'].item() == configured['loss'].item()


def test_a_datum_without_marked_labels_has_no_ratio():
    """Tinker's gspo names the datum whose mask is all 0."""
    arrays = make_arrays((2, 2))
    arrays.streams['sequence_ratio_mask'] = np.array([1.0, 0.0, 0.0, 0.0])
    with pytest.raises(InvalidLossInput) as refusal:
        build_loss('gspo', clip_low_threshold=0.9, clip_high_threshold=1.1)(arrays.torch())
    assert refusal.value.index == 1
