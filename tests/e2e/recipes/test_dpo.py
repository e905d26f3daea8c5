"""DPO on the small real model, as the recipe runs it."""

from pathlib import Path

import pytest

from fixtures.recipe_runs import column, run_recipe

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize('seed', [0, 1, 2])
def test_margins_of_pairs_not_trained_on_rise(seed: int, tmp_path: Path) -> None:
    """From 0, where policy and reference are one, to what the recipe states; nearly every pair is told apart."""
    curve = run_recipe('dpo', tmp_path, seed=seed)
    margins, accuracies = column(curve, 'margins'), column(curve, 'accuracies')
    assert (margins[0], accuracies[0]) == (0.0, 0.0)
    assert margins[-1] > 1.0
    assert accuracies[-1] >= 0.9
    assert column(curve, 'chosen')[-1] > column(curve, 'rejected')[-1]
