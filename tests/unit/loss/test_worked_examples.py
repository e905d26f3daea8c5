"""Compares preference, distillation and contrastive losses with values from papers or computed by hand.

`h` is the log-ratio of policy to reference for the chosen response, minus that for the rejected response.
Legend: R labels, V vocabulary, F features, D embedding width.
"""

import math

import numpy as np
import pytest
import torch

from twinkle.loss import LossBatch, build_loss

LN2 = math.log(2)
PAIRS = ('DPOLoss', 'SimPOLoss', 'CPOLoss', 'ORPOLoss')


def pair(chosen: list[float], rejected: list[float], reference: tuple[float, float] | None = None) -> LossBatch:
    """Return one pair, built from the log-probabilities of its labels; the reference has one number per response."""
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
    """Return a loss and its gradient with respect to each log-probability."""
    loss = build_loss(name, **options)(batch)['loss']
    (gradient,) = torch.autograd.grad(loss, [batch.logps_R])
    return loss.item(), gradient.tolist()


def test_dpo_gradient():
    """The DPO gradient is beta sigmoid(r_rejected - r_chosen) with opposite signs (arXiv 2305.18290, section 4).

    Log-ratios 1 and -1 at beta 0.5 are rewards 0.5 and -0.5: the weight is 0.5 sigmoid(-1) = 0.134471.
    """
    loss, gradient = value_and_gradient('DPOLoss', pair([-2.0], [-5.0], reference=(-3.0, -4.0)), beta=0.5)
    assert loss == pytest.approx(0.3132617)
    assert gradient == pytest.approx([-0.1344707, 0.1344707])


@pytest.mark.parametrize(
    ('loss_type', 'expected'), [('sigmoid', LN2), ('hinge', 1.0), ('ipo', 25.0), ('kto_pair', 0.5)]
)
def test_dpo_of_equal_policy_and_reference(loss_type, expected):
    """DPO of equal policy and reference has the loss ln 2, 1, (1 / (2 beta))^2 or 1/2, depending on `loss_type`."""
    loss, _ = value_and_gradient('DPOLoss', pair([-1.0], [-7.0], reference=(-1.0, -7.0)), beta=0.1, loss_type=loss_type)
    assert loss == pytest.approx(expected)


def test_ipo_has_no_gradient_at_its_margin():
    """The gradient of IPO is 0 at a log-ratio margin of 1 / (2 tau), unlike DPO's (arXiv 2310.12036, section 5)."""
    batch = pair([-1.0], [-6.0], reference=(-3.0, -3.0))  # h = 2 - (-3) = 5 = 1 / (2 * 0.1)
    assert value_and_gradient('DPOLoss', batch, beta=0.1, loss_type='ipo') == (pytest.approx(0), pytest.approx([0, 0]))
    _, gradient = value_and_gradient('DPOLoss', batch, beta=0.1)
    assert gradient[0] < -0.03


def test_hinge_loss_is_zero_beyond_its_margin():
    """The hinge loss is 0 for beta h of at least 1 and has slope beta below (arXiv 2309.06657)."""
    assert value_and_gradient('DPOLoss', pair([0.0], [0.0], reference=(-6.0, 5.0)), beta=0.1, loss_type='hinge') == (
        0.0,
        [0.0, 0.0],
    )
    loss, gradient = value_and_gradient(
        'DPOLoss', pair([0.0], [0.0], reference=(-2.0, 2.0)), beta=0.1, loss_type='hinge'
    )
    assert (loss, gradient) == (pytest.approx(0.6), pytest.approx([-0.1, 0.1]))


def test_kto_compares_each_side_with_the_divergence_of_the_other():
    """KTO compares each response with the divergence of the other responses (arXiv 2402.01306, equation 7).

    Log-ratios 3 and -2 at beta 1 give z of 3 and 0. Chosen: 1 - sigmoid(3 - 0) = 0.0474259. Rejected:
    1 - sigmoid(3 + 2) = 0.0066929. Half of the sum: 0.0270594.
    """
    batch = pair([0.0], [0.0], reference=(-3.0, 2.0))
    loss, _ = value_and_gradient('DPOLoss', batch, beta=1.0, loss_type='kto_pair')
    assert loss == pytest.approx(0.0270594, abs=1e-7)


def test_conservative_dpo_optimum():
    """Conservative DPO with smoothing e has no gradient at sigmoid(beta h) = 1 - e, here 0.8 (arXiv 2403.00409)."""
    margin = math.log(0.8 / 0.2) / 0.5
    batch = pair([0.0], [0.0], reference=(-margin, 0.0))
    _, gradient = value_and_gradient('DPOLoss', batch, beta=0.5, label_smoothing=0.2)
    assert gradient == pytest.approx([0.0, 0.0], abs=1e-12)


def test_simpo_compares_means_with_a_margin():
    """SimPO compares means with a margin: -log sigmoid(2 - 1) for any length (arXiv 2405.14734, equation 6)."""
    expected = 0.3132617
    for length in (1, 3):
        loss, gradient = value_and_gradient('SimPOLoss', pair([-1.0] * length, [-2.0, -2.0]), beta=2.0, gamma=1.0)
        assert loss == pytest.approx(expected)
        assert sum(gradient[:length]) == pytest.approx(-2 * 0.2689414, abs=1e-6)


def test_cpo_adds_a_cloning_term():
    """CPO adds the chosen response's mean loss, here 1, to the preference loss (arXiv 2401.08417, equation 6)."""
    loss, _ = value_and_gradient('CPOLoss', pair([-1.0, -1.0], [-4.0]), beta=0.5, bc_coef=1.0)
    assert loss == pytest.approx(0.3132617 + 1.0)


def test_orpo_compares_odds():
    """ORPO compares odds: 1 and 1/3 for probabilities 1/2 and 1/4 (arXiv 2403.07691, equations 4 to 7)."""
    batch = pair([math.log(0.5)], [math.log(0.25)])
    loss, _ = value_and_gradient('ORPOLoss', batch, lambda_orpo=0.1)
    assert loss == pytest.approx(LN2 - 0.1 * math.log(0.75))


@pytest.mark.parametrize('name', PAIRS)
def test_every_preference_makes_the_chosen_more_likely(name):
    """The gradient makes the chosen response more likely and the rejected response less likely."""
    _, (chosen, rejected) = value_and_gradient(name, pair([-1.0], [-1.5], reference=(-1.2, -1.2)))
    assert chosen < 0 < rejected


def gkd_loss(teacher: list[float], student: list[float], beta: float) -> float:
    """Return the GKD loss of two distributions over a vocabulary; probability 0 is represented by e^-60."""
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


def test_gkd_at_beta_0_and_1_is_a_one_sided_divergence():
    """GKD at beta 0 and 1 is the forward and the reverse divergence (arXiv 2306.13649, section 2)."""
    assert gkd_loss([0.75, 0.25], [0.5, 0.5], beta=0.0) == pytest.approx(0.1308120, abs=1e-7)
    assert gkd_loss([0.75, 0.25], [0.5, 0.5], beta=1.0) == pytest.approx(0.1438410, abs=1e-7)


def test_gkd_at_beta_half_is_bounded_by_ln_2():
    """GKD at beta 1/2 is the Jensen-Shannon divergence: ln 2 for disjoint distributions, 0 for equal distributions."""
    assert gkd_loss([1.0, 0.0], [0.0, 1.0], beta=0.5) == pytest.approx(LN2)
    assert gkd_loss([0.2, 0.8], [0.2, 0.8], beta=0.5) == pytest.approx(0.0, abs=1e-12)
    assert gkd_loss([0.75, 0.25], [0.5, 0.5], beta=0.5) == pytest.approx(0.0338221, abs=1e-7)


def test_slope_of_gkd_at_0_is_the_forward_divergence():
    """The limit of JSD(beta) / beta at beta 0 is the forward divergence (arXiv 2306.13649, section 2)."""
    forward = gkd_loss([0.75, 0.25], [0.5, 0.5], beta=0.0)
    assert gkd_loss([0.75, 0.25], [0.5, 0.5], beta=1e-6) / 1e-6 == pytest.approx(forward, rel=1e-5)


def infonce(embeddings: np.ndarray, **options: object) -> tuple[float, float]:
    """Return the InfoNCE loss of alternating anchors and positives, and its accuracy."""
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


def test_infonce_of_identical_embeddings():
    """The InfoNCE loss of identical embeddings is the logarithm of the number of candidates (arXiv 1807.03748)."""
    loss, _ = infonce(np.ones((8, 3)))
    assert loss == pytest.approx(math.log(4))


def test_infonce_of_four_orthogonal_pairs():
    """InfoNCE of four orthogonal pairs at temperature 1/2 is -log(e^2 / (e^2 + 3)), with accuracy 1."""
    loss, accuracy = infonce(np.repeat(np.eye(4), 2, axis=0) * 7.0, temperature=0.5)
    assert loss == pytest.approx(math.log(1 + 3 * math.exp(-2)))
    assert accuracy == 1.0


def test_infonce_accuracy_equals_a_search():
    """The InfoNCE accuracy equals the accuracy of a nearest-neighbor search by cosine in numpy."""
    embeddings = np.random.default_rng(3).normal(size=(40, 5))
    units = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    found = (units[0::2] @ units[1::2].T).argmax(axis=1)
    expected = float((found == np.arange(20)).mean())
    assert infonce(embeddings)[1] == pytest.approx(expected)
    assert 0 < expected < 1
