"""Continued pre-training on the project's own documents, with a tiny model."""

from pathlib import Path

import pytest

from fixtures.recipe_runs import column, run_recipe
from fixtures.tiny_model import build_tiny_model

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]


def test_perplexity_of_text_that_was_not_read_falls(tmp_path: Path) -> None:
    """An adapter of rank 32 over packs learns what a language of bytes is like: held out, from about 1200 to 50."""
    model = build_tiny_model(tmp_path / 'model')
    options = ('--model', str(model), '--steps', '40', '--learning-rate', '1e-2', '--evaluate-every', '20')
    curve = run_recipe('pretraining', tmp_path / 'out', seed=5, options=options)
    perplexities = column(curve, 'held_out_perplexity')
    assert len(perplexities) == 3
    assert perplexities[-1] < perplexities[1] < perplexities[0]
    assert perplexities[-1] < perplexities[0] / 5
    losses = column(curve, 'loss')
    assert sum(losses[-5:]) / 5 < losses[0] - 1.5
