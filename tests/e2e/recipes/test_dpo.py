"""The DPO recipe on the small real model."""

import pytest

from fixtures.recipe_runs import Curve, column, run_seeds

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
SEEDS = (0, 1, 2)


@pytest.fixture(scope='module')
def curves(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Curve]:
    """Curves of all seeds."""
    return run_seeds('dpo', tmp_path_factory.mktemp('out'), SEEDS)


@pytest.mark.parametrize('seed', SEEDS)
def test_margins_of_held_out_pairs_rise(seed: int, curves: dict[int, Curve]) -> None:
    """Held-out margins rise from 0 to above 1, the accuracy reaches 0.9, and chosen answers get larger rewards."""
    curve = curves[seed]
    margins, accuracies = column(curve, 'margins'), column(curve, 'accuracies')
    assert (margins[0], accuracies[0]) == (0.0, 0.0)
    assert margins[-1] > 1.0
    assert accuracies[-1] >= 0.9
    assert column(curve, 'chosen')[-1] > column(curve, 'rejected')[-1]
