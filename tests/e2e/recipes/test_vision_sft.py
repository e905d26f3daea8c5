"""The vision recipe on a tiny model with random weights."""

from pathlib import Path

import pytest

from fixtures.recipe_runs import column, run_recipe

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


def test_accuracy_depends_on_the_pictures(tmp_path: Path) -> None:
    """The accuracy on held-out pictures exceeds 0.8, but is below 0.55 with empty pictures; the loss falls."""
    curve = run_recipe('vision_sft', tmp_path)
    accuracy, blind = column(curve, 'accuracy')[-1], column(curve, 'blind_accuracy')[-1]
    assert blind < 0.55
    assert accuracy > 0.8
    losses = column(curve, 'loss')
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
