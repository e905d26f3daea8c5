"""Questions about pictures, as the recipe trains them on a tiny model of random weights."""

from pathlib import Path

import pytest

from fixtures.recipe_runs import column, run_recipe

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


def test_held_out_pictures_are_understood_by_their_pixels(tmp_path: Path) -> None:
    """Far more questions are answered right than over an empty ground, which is what the text alone gives away."""
    curve = run_recipe('vision_sft', tmp_path)
    accuracy, blind = column(curve, 'accuracy')[-1], column(curve, 'blind_accuracy')[-1]
    assert blind < 0.55
    assert accuracy > 0.8
    losses = column(curve, 'loss')
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
