"""The embedding recipe on the small real model."""

import pytest

from fixtures.recipe_runs import Curve, column, run_seeds

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
SEEDS = (0, 1, 2)


@pytest.fixture(scope='module')
def curves(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Curve]:
    """Curves of all seeds."""
    return run_seeds('embedding', tmp_path_factory.mktemp('out'), SEEDS)


@pytest.mark.parametrize('seed', SEEDS)
def test_retrieval_of_held_out_pairs_improves(seed: int, curves: dict[int, Curve]) -> None:
    """The accuracy rises from at most 0.4 to at least 0.8, the margin exceeds 0.2, and the loss falls by half."""
    curve = curves[seed]
    accuracy, margin = column(curve, 'accuracy'), column(curve, 'margin')
    assert accuracy[0] <= 0.4
    assert accuracy[-1] >= 0.8
    assert margin[-1] > 0.2 > margin[0]
    assert column(curve, 'loss')[-1] < column(curve, 'loss')[0] / 2
