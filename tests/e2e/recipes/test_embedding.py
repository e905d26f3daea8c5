"""InfoNCE on the small real model, as the recipe runs it."""

import pytest

from fixtures.recipe_runs import Curve, column, run_seeds

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
SEEDS = (0, 1, 2)


@pytest.fixture(scope='module')
def curves(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Curve]:
    """Curves of all seeds."""
    return run_seeds('embedding', tmp_path_factory.mktemp('out'), SEEDS)


@pytest.mark.parametrize('seed', SEEDS)
def test_retrieval_of_pairs_not_trained_on_rises(seed: int, curves: dict[int, Curve]) -> None:
    """The nearest of 32 titles is the right one as often as the recipe states; positives are nearer than the others."""
    curve = curves[seed]
    accuracy, margin = column(curve, 'accuracy'), column(curve, 'margin')
    assert accuracy[0] <= 0.4
    assert accuracy[-1] >= 0.8
    assert margin[-1] > 0.2 > margin[0]
    assert column(curve, 'loss')[-1] < column(curve, 'loss')[0] / 2
