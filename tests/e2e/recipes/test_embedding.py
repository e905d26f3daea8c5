"""InfoNCE on the small real model, as the recipe runs it."""

from pathlib import Path

import pytest

from fixtures.recipe_runs import column, run_recipe

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize('seed', [0, 1, 2])
def test_retrieval_of_pairs_not_trained_on_rises(seed: int, tmp_path: Path) -> None:
    """The nearest of 32 titles is the right one as often as the recipe states; positives are nearer than the others."""
    curve = run_recipe('embedding', tmp_path, seed=seed)
    accuracy, margin = column(curve, 'accuracy'), column(curve, 'margin')
    assert accuracy[0] <= 0.4
    assert accuracy[-1] >= 0.8
    assert margin[-1] > 0.2 > margin[0]
    assert column(curve, 'loss')[-1] < column(curve, 'loss')[0] / 2
