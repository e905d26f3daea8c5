"""Losses of preferences, distillation and contrast at points whose values the papers state or a pencil finds."""

import math

import numpy as np
import pytest
import torch

from twinkle.loss import LossBatch, build_loss

LN2 = math.log(2)
PAIRS = ('DPOLoss', 'SimPOLoss', 'CPOLoss', 'ORPOLoss')


def pair(chosen: list[float], rejected: list[float], reference: tuple[float, float] | None = None) -> LossBatch:
    """Return one pair by the log-probabilities of its labels; the reference's are one number for each response."""
    logps = torch.tensor([*chosen, *rejected], dtype=torch.float64, requires_grad=True)
    owners = torch.tensor([0] * len(chosen) + [1] * len(rejected))
    streams = {} if reference is None else {'ref_logps': torch.tensor(reference, dtype=torch.float64)[owners]}
    return LossBatch(
        logps_R=logps,
        labels_R=torch.zeros(len(logps), dtype=torch.int64),
        weights_R=torch.ones(len(logps), dtype=torch.float64),
        features_R=owners,
        streams=streams,
    )


def value_and_gradient(name: str, batch: LossBatch, **options: object) -> tuple[float, list[float]]:
    """Return a loss, and its gradient by each log-probability."""
    loss = build_loss(name, **options)(batch)['loss']
    (gradient,) = torch.autograd.grad(loss, [batch.logps_R])
    return loss.item(), gradient.tolist()


def test_dpo_weighs_a_pair_by_how_wrong_its_rewards_are():
    """The gradient of arXiv 2305.18290, section 4: beta sigmoid(r_rejected - r_chosen), up for one, down for the other.

    Log-ratios 1 and -1 at beta 0.5 are rewards 0.5 and -0.5: the weight is 0.5 sigmoid(-1) = 0.134471.
    """
    loss, gradient = value_and_gradient('DPOLoss', pair([-2.0], [-5.0], reference=(-3.0, -4.0)), beta=0.5)
    assert loss == pytest.approx(0.3132617)
    assert gradient == pytest.approx([-0.1344707, 0.1344707])


@pytest.mark.parametrize(
    ('loss_type', 'expected'), [('sigmoid', LN2), ('hinge', 1.0), ('ipo', 25.0), ('kto_pair', 0.5)]
)
def test_where_policy_and_reference_are_one_nothing_is_known(loss_type, expected):
    """Ln 2, a whole margin, (1 / (2 beta))^2, and half of each side, at beta 0.1."""
    loss, _ = value_and_gradient('DPOLoss', pair([-1.0], [-7.0], reference=(-1.0, -7.0)), beta=0.1, loss_type=loss_type)
    assert loss == pytest.approx(expected)


def test_ipo_rests_at_its_margin_and_dpo_never():
    """By arXiv 2310.12036, section 5: the log-ratios' distance is drawn to 1 / (2 tau), where DPO draws on for ever."""
    batch = pair([-1.0], [-6.0], reference=(-3.0, -3.0))  # h = 2 - (-3) = 5 = 1 / (2 * 0.1)
    assert value_and_gradient('DPOLoss', batch, beta=0.1, loss_type='ipo') == (pytest.approx(0), pytest.approx([0, 0]))
    _, gradient = value_and_gradient('DPOLoss', batch, beta=0.1)
    assert gradient[0] < -0.03


def test_a_hinge_is_satisfied_beyond_its_margin():
    """By arXiv 2309.06657: nothing more to learn from beta h = 1 on; before it the slope is beta."""
    assert value_and_gradient('DPOLoss', pair([0.0], [0.0], reference=(-6.0, 5.0)), beta=0.1, loss_type='hinge') == (
        0.0,
        [0.0, 0.0],
    )
    loss, gradient = value_and_gradient(
        'DPOLoss', pair([0.0], [0.0], reference=(-2.0, 2.0)), beta=0.1, loss_type='hinge'
    )
    assert (loss, gradient) == (pytest.approx(0.6), pytest.approx([-0.1, 0.1]))


def test_kto_compares_each_side_with_the_other_s_divergence():
    """By arXiv 2402.01306, equation 7, by hand: log-ratios 3 and -2 at beta 1, so z is 3 for one and 0 for the other.

    Chosen: 1 - sigmoid(3 - 0) = 0.0474259. Rejected: 1 - sigmoid(3 + 2) = 0.0066929. Half of both: 0.0270594.
    """
    batch = pair([0.0], [0.0], reference=(-3.0, 2.0))
    loss, _ = value_and_gradient('DPOLoss', batch, beta=1.0, loss_type='kto_pair')
    assert loss == pytest.approx(0.0270594, abs=1e-7)


def test_conservative_dpo_rests_where_its_labels_are_as_sure_as_it_is():
    """By arXiv 2403.00409: with a share e of flipped labels the optimum is sigmoid(beta h) = 1 - e, here 0.8."""
    margin = math.log(0.8 / 0.2) / 0.5
    batch = pair([0.0], [0.0], reference=(-margin, 0.0))
    _, gradient = value_and_gradient('DPOLoss', batch, beta=0.5, label_smoothing=0.2)
    assert gradient == pytest.approx([0.0, 0.0], abs=1e-12)


def test_simpo_is_of_means_and_asks_for_a_margin():
    """By arXiv 2405.14734, equation 6: means -1 and -2, beta 2, gamma 1: -log sigmoid(2 - 1); lengths do not count."""
    expected = 0.3132617
    for length in (1, 3):
        loss, gradient = value_and_gradient('SimPOLoss', pair([-1.0] * length, [-2.0, -2.0]), beta=2.0, gamma=1.0)
        assert loss == pytest.approx(expected)
        assert sum(gradient[:length]) == pytest.approx(-2 * 0.2689414, abs=1e-6)


def test_cpo_prefers_and_clones():
    """By arXiv 2401.08417, equation 6: sums -2 and -4 at beta 0.5 differ by 1; cloning adds the chosen mean's 1."""
    loss, _ = value_and_gradient('CPOLoss', pair([-1.0, -1.0], [-4.0]), beta=0.5, bc_coef=1.0)
    assert loss == pytest.approx(0.3132617 + 1.0)


def test_orpo_compares_odds():
    """By arXiv 2403.07691, equations 4 to 7: 1/2 against 1/4 are odds 1 and 1/3; sigmoid(log 3) = 3/4."""
    batch = pair([math.log(0.5)], [math.log(0.25)])
    loss, _ = value_and_gradient('ORPOLoss', batch, lambda_orpo=0.1)
    assert loss == pytest.approx(LN2 - 0.1 * math.log(0.75))


@pytest.mark.parametrize('name', PAIRS)
def test_every_preference_makes_the_chosen_likelier_than_the_rejected(name):
    """By descent: the chosen one's gradient is negative, the rejected one's positive."""
    _, (chosen, rejected) = value_and_gradient(name, pair([-1.0], [-1.5], reference=(-1.2, -1.2)))
    assert chosen < 0 < rejected


def distilled(teacher: list[float], student: list[float], beta: float) -> float:
    """Return GKD of two distributions over a whole vocabulary, of which 0 is written as e^-60."""
    as_logits = [torch.tensor([[math.log(max(p, math.exp(-60))) for p in row]]).double() for row in (teacher, student)]
    batch = LossBatch(
        logps_R=torch.zeros(1, dtype=torch.float64),
        labels_R=torch.zeros(1, dtype=torch.int64),
        weights_R=torch.ones(1, dtype=torch.float64),
        features_R=torch.zeros(1, dtype=torch.int64),
        logits_RV=as_logits[1],
        streams={'teacher_logits': as_logits[0]},
    )
    return build_loss('GKDLoss', beta=beta, teacher='full')(batch)['loss'].item()


def test_gkd_s_ends_are_the_two_divergences():
    """By arXiv 2306.13649, section 2: teacher (3/4, 1/4), student even. Forward 0.1308120, reverse 0.1438410."""
    assert distilled([0.75, 0.25], [0.5, 0.5], beta=0.0) == pytest.approx(0.1308120, abs=1e-7)
    assert distilled([0.75, 0.25], [0.5, 0.5], beta=1.0) == pytest.approx(0.1438410, abs=1e-7)


def test_gkd_s_middle_is_bounded_by_ln_2():
    """Jensen-Shannon's divergence of distributions that share nothing, and of the same ones."""
    assert distilled([1.0, 0.0], [0.0, 1.0], beta=0.5) == pytest.approx(LN2)
    assert distilled([0.2, 0.8], [0.2, 0.8], beta=0.5) == pytest.approx(0.0, abs=1e-12)
    assert distilled([0.75, 0.25], [0.5, 0.5], beta=0.5) == pytest.approx(0.0338221, abs=1e-7)


def test_gkd_s_slope_at_0_is_the_forward_divergence():
    """By arXiv 2306.13649, section 2: the limit of JSD(beta) / beta as beta falls to 0."""
    forward = distilled([0.75, 0.25], [0.5, 0.5], beta=0.0)
    assert distilled([0.75, 0.25], [0.5, 0.5], beta=1e-6) / 1e-6 == pytest.approx(forward, rel=1e-5)


def contrasted(embeddings: np.ndarray, **options: object) -> tuple[float, float]:
    """Return InfoNCE over pairs of anchor and positive, and the share of anchors it finds right."""
    count = len(embeddings)
    batch = LossBatch(
        logps_R=torch.zeros(count, dtype=torch.float64),
        labels_R=torch.tensor([1 - index % 2 for index in range(count)]),
        weights_R=torch.ones(count, dtype=torch.float64),
        features_R=torch.arange(count),
        embeddings_FD=torch.tensor(embeddings),
    )
    output = build_loss('InfonceLoss', **options)(batch)
    return output['loss'].item() / output['num_tokens'], output['metrics']['accuracy']


def test_infonce_of_what_cannot_be_told_apart_is_the_logarithm_of_the_choices():
    """By arXiv 1807.03748, section 2.3: at least log N less the loss is known, so here nothing."""
    loss, _ = contrasted(np.ones((8, 3)))
    assert loss == pytest.approx(math.log(4))


def test_infonce_of_four_right_angles_by_hand():
    """Each anchor lies on its positive, square to the others: -log(e^2 / (e^2 + 3)) at temperature 1/2."""
    loss, accuracy = contrasted(np.repeat(np.eye(4), 2, axis=0) * 7.0, temperature=0.5)
    assert loss == pytest.approx(math.log(1 + 3 * math.exp(-2)))
    assert accuracy == 1.0


def test_infonce_s_accuracy_is_what_a_search_finds():
    """Against a search among all positives in numpy, by cosines."""
    embeddings = np.random.default_rng(3).normal(size=(40, 5))
    units = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    found = (units[0::2] @ units[1::2].T).argmax(axis=1)
    expected = float((found == np.arange(20)).mean())
    assert contrasted(embeddings)[1] == pytest.approx(expected)
    assert 0 < expected < 1
