"""Compares metrics of losses with independent formulas, and checks the signatures that users rely on.

Legend: R labels, F features, D embedding width.
"""

import inspect
import math

import numpy as np
import pytest
import torch

from fixtures import loss_formulas as formula
from fixtures.loss_batches import make_arrays
from fixtures.loss_cases import CASES, Case, case_id
from twinkle.loss import LOSSES, build_loss
from twinkle.loss.pairs import log1mexp


def policy_reports(case: Case, arrays) -> dict[str, float]:
    """Return the expected metrics of a policy-gradient loss."""
    loss = case.loss
    ratio = formula.sequence_ratio if case.name == 'GSPOLoss' else formula.ratio_of
    ratios = np.array([ratio(arrays, arrays, row) for row in range(len(arrays.logps_R))])
    advantages = arrays.streams['advantages']
    reports = {'ratio': ratios.mean(), 'approx_kl': (ratios - 1 - np.log(ratios)).mean()}
    if case.name == 'CISPOLoss':
        reports['clip_fraction'] = np.mean([ratio > 1 + loss.epsilon for ratio in ratios])
    elif hasattr(loss, 'epsilon'):
        low, high = 1 - loss.epsilon, 1 + loss.epsilon_high
        pairs = zip(ratios, advantages, strict=True)
        reports['clip_fraction'] = np.mean([(a > 0 and r > high) or (a < 0 and r < low) for r, a in pairs])
    if loss.correction.kind != 'none':
        k = np.array([formula.sampler_ratio(arrays, row) for row in range(len(ratios))])
        is_low = (k < loss.correction.low) & (loss.correction.kind == 'masked')
        reports['sampler_ratio'] = k.mean()
        reports['sampler_kl'] = (k - 1 - np.log(k)).mean()
        reports['corrected_fraction'] = ((k > loss.correction.high) | is_low).mean()
    if loss.beta:
        odds = np.exp(arrays.streams['ref_logps'] - arrays.logps_R)
        reports['ref_kl'] = (odds - 1 - np.log(odds)).mean()
    if loss.entropy_coef:
        reports['entropy'] = arrays.entropies_R.mean()
    return reports


POLICY_CASES = [case for case in CASES if 'advantages' in case.loss.required_streams and case.name.endswith('Loss')]


@pytest.mark.parametrize('case', POLICY_CASES, ids=case_id)
def test_policies_report_ratios_divergences_and_clipping(case):
    """Policy losses report means over the labels of ratios, divergences and clipping."""
    arrays = case.arrays(seed=9)
    metrics = case.loss(arrays.torch())['metrics']
    assert metrics == pytest.approx(policy_reports(case, arrays), rel=1e-9, abs=1e-12)


def rewards_of(case: Case, arrays) -> list[tuple[float, float]]:
    """Return the rewards of each pair's responses, scaled as by the loss."""
    match case.name:
        case 'DPOLoss':
            ratios = formula.responses(arrays, arrays, has_reference=not case.loss.reference_free)
            return [(case.loss.beta * chosen, case.loss.beta * rejected) for chosen, rejected in ratios]
        case 'SimPOLoss':
            return [(2.5 * w, 2.5 * r) for w, r in formula.responses(arrays, arrays, is_mean=True)]
        case 'CPOLoss':
            return [(0.1 * w, 0.1 * r) for w, r in formula.responses(arrays, arrays)]
    odds = [
        [math.log(math.exp(x) / (1 - math.exp(x))) for x in p] for p in formula.responses(arrays, arrays, is_mean=True)
    ]
    return [(chosen, rejected) for chosen, rejected in odds]


@pytest.mark.parametrize('case', [case for case in CASES if case.loss.group_size == 2], ids=case_id)
def test_preferences_report_rewards_and_accuracies(case):
    """Preference losses report mean rewards, margins and accuracies, and the cloning loss if they have one."""
    arrays = case.arrays(seed=10)
    chosen, rejected = np.array(rewards_of(case, arrays)).T
    expected = {
        'chosen_reward': chosen.mean(),
        'rejected_reward': rejected.mean(),
        'reward_margin': (chosen - rejected).mean(),
        'reward_accuracy': (chosen > rejected).mean(),
    }
    if case.name in ('CPOLoss', 'ORPOLoss') or getattr(case.loss, 'sft_weight', 0.0):
        expected['sft_loss'] = -np.mean([w for w, _ in formula.responses(arrays, arrays, is_mean=True)])
    assert case.loss(arrays.torch())['metrics'] == pytest.approx(expected, rel=1e-9)
    assert 0.0 < expected['reward_accuracy'] < 1.0


def test_critics_report_values_and_clip_fractions():
    """Value losses report mean values, returns, errors and the fraction of clipped values."""
    arrays = make_arrays((6, 3), seed=3)
    metrics = build_loss('PPOValueLoss')(arrays.torch())['metrics']
    values, old, returns = arrays.values_R, arrays.streams['old_values'], arrays.streams['returns']
    clipped = np.clip(values, old - 0.2, old + 0.2)
    expected = {
        'value': values.mean(),
        'return': returns.mean(),
        'value_error': ((values - returns) ** 2).mean(),
        'clip_fraction': ((clipped - returns) ** 2 > (values - returns) ** 2).mean(),
    }
    assert metrics == pytest.approx(expected)
    assert 0.0 < expected['clip_fraction'] < 1.0
    reported = build_loss('MSELoss')(arrays.torch())['metrics']
    assert reported == pytest.approx({name: expected[name] for name in ('value', 'return')})


def test_distillation_reports_the_divergence():
    """The reported divergence is the mean over the labels, independent of their weights."""
    arrays = make_arrays((2, 3), seed=3)
    weightless = formula.gkd(0.5, 1.0, is_full=False)
    arrays.weights_R[:] = 2.0
    metrics = build_loss('GKDLoss')(arrays.torch())['metrics']
    assert metrics == pytest.approx({'divergence': weightless(arrays, arrays)[0] / 2.0 / 5})


def test_embeddings_report_similarities_and_accuracies():
    """InfoNCE reports similarities and the accuracy over anchors and unmasked negatives."""
    arrays = make_arrays((1,) * 6, is_grouped=True)
    corners = {0: (1, 0), 1: (1, 0), 2: (0, 1), 3: (0, 1), 4: (1, 0), 5: (0, 1)}
    arrays.embeddings_FD[:] = 0.0
    for index, corner in corners.items():
        arrays.embeddings_FD[index, :2] = np.array(corner) * (index + 1)
    metrics = build_loss('InfonceLoss')(arrays.torch())['metrics']
    # Candidates of the first anchor have cosines 0, 1, 0; those of the second, which equals its negative, 0, 1, 1.
    assert metrics == pytest.approx({'accuracy': 0.5, 'positive_similarity': 0.5, 'negative_similarity': 0.5})
    alone = build_loss('InfonceLoss', use_batch=False)(arrays.torch())['metrics']
    assert alone == pytest.approx({'accuracy': 0.5, 'positive_similarity': 0.5, 'negative_similarity': 0.5})
    unmasked = build_loss('InfonceLoss', mask_fake_negative=True)(arrays.torch())['metrics']
    assert unmasked['negative_similarity'] == pytest.approx(1 / 4)


def test_log1mexp_is_accurate():
    """`log1mexp` is accurate from -1e-7 to -700, compared with extended precision."""
    values = -np.geomspace(1e-7, 700.0, 200)
    precise = np.longdouble(values)
    expected = np.where(precise > -0.7, np.log(-np.expm1(precise)), np.log1p(-np.exp(precise)))
    computed = log1mexp(torch.tensor(values, requires_grad=True))
    np.testing.assert_allclose(computed.detach().numpy(), expected.astype(np.float64), rtol=1e-14, atol=0.0)
    single = log1mexp(torch.tensor(values, dtype=torch.float32)).numpy()
    np.testing.assert_allclose(single, expected.astype(np.float64), rtol=1e-5, atol=1e-38)
    assert log1mexp(torch.zeros(1)).isfinite()


SIGNATURES = {
    'CrossEntropyLoss': {'ignore_index': -100, 'reduction': 'mean', 'dft': False},
    'MSELoss': {'ignore_index': -100},
    'DPOLoss': {
        'beta': 0.1, 'label_smoothing': 0.0, 'loss_type': 'sigmoid', 'reference_free': False, 'sft_weight': 0.0,
    },
    'SimPOLoss': {'beta': 2.5, 'gamma': 0.5},
    'CPOLoss': {'beta': 0.1, 'bc_coef': 1.0},
    'ORPOLoss': {'lambda_orpo': 0.1},
    'GKDLoss': {'beta': 0.5, 'temperature': 1.0, 'chunk_size': 512},
    'GRPOLoss': {'epsilon': 0.2, 'epsilon_high': None, 'beta': 0.0, 'entropy_coef': 0.0},
    'PPOLoss': {'loss_agg_mode': 'token-mean', 'epsilon': 0.2},
    'GSPOLoss': {'epsilon': None, 'epsilon_high': None, 'beta': 0.0},
    'SAPOLoss': {'tau_pos': 1.0, 'tau_neg': 1.05, 'beta': 0.0},
    'CISPOLoss': {'epsilon': 0.2, 'beta': 0.0},
    'BNPOLoss': {'epsilon': 0.2, 'beta': 0.0},
    'DRGRPOLoss': {'max_completion_length': 1024, 'epsilon': 0.2, 'beta': 0.0},
    'PPOValueLoss': {'epsilon': 0.2},
    'InfonceLoss': {
        'temperature': 0.1, 'use_batch': True, 'hard_negatives': None, 'mask_fake_negative': False,
        'fake_neg_margin': 0.1, 'include_qq': False, 'include_dd': False,
    },
    'DROLoss': {'beta': 0.05},
    'ppo': {'clip_low_threshold': 0.8, 'clip_high_threshold': 1.2},
    'cispo': {'clip_low_threshold': 0.0, 'clip_high_threshold': 4.0},
    'dro': {'beta': 0.05},
    'cross_entropy': {},
    'importance_sampling': {},
    'gspo': {},
}  # fmt: skip
"""Arguments and defaults that existing programs rely on."""


@pytest.mark.parametrize('name', SIGNATURES)
def test_names_and_defaults_are_unchanged(name):
    """Names, arguments and defaults of losses are unchanged."""
    parameters = inspect.signature(type(build_loss(name, **REQUIRED.get(name, {})))).parameters
    assert {key: parameters[key].default for key in SIGNATURES[name]} == SIGNATURES[name]
    assert name in LOSSES.names


REQUIRED = {'gspo': {'clip_low_threshold': 0.9, 'clip_high_threshold': 1.1}}
