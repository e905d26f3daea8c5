"""The pre-training recipe on the project's documentation, with a tiny model."""

from pathlib import Path

import pytest

from fixtures.recipe_runs import column, run_recipe
from fixtures.tiny_model import build_tiny_model

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]


def test_perplexity_of_held_out_text_falls(tmp_path: Path) -> None:
    """Training lowers the held-out perplexity at each evaluation, in total to less than a fifth."""
    model = build_tiny_model(tmp_path / 'model')
    options = ('--model', str(model), '--steps', '40', '--learning-rate', '1e-2', '--evaluate-every', '20')
    curve = run_recipe('pretraining', tmp_path / 'out', seed=5, options=options)
    perplexities = column(curve, 'held_out_perplexity')
    assert len(perplexities) == 3
    assert perplexities[-1] < perplexities[1] < perplexities[0]
    assert perplexities[-1] < perplexities[0] / 5
    losses = column(curve, 'loss')
    assert sum(losses[-5:]) / 5 < losses[0] - 1.5
