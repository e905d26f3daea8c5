"""Distillation, as the recipe runs it: on the small real model, and between tiny models of other weights."""

from pathlib import Path

import pytest

from fixtures.recipe_runs import column, run_recipe
from fixtures.tiny_model import build_tiny_model

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize('seed', [0, 1, 2])
def test_divergence_on_questions_not_trained_on_falls(seed: int, tmp_path: Path) -> None:
    """A student that learns from its own answers ends as near to its teacher as the recipe states."""
    divergence = column(run_recipe('gkd', tmp_path, seed=seed), 'divergence')
    assert divergence[-1] < 0.6 * divergence[0]


@pytest.mark.parametrize('on_policy', [1.0, 0.0])
def test_a_teacher_of_other_weights_is_approached(on_policy: float, tmp_path: Path) -> None:
    """By the student's own answers, and by the teacher's."""
    models = [build_tiny_model(tmp_path / f'model_{seed}', seed=seed) for seed in (0, 1)]
    sizes = ('--model', str(models[0]), '--teacher', str(models[1]), '--steps', '15', '--prompts', '8')
    options = (*sizes, '--learning-rate', '5e-3', '--on-policy', str(on_policy))
    divergence = column(run_recipe('gkd', tmp_path / 'out', options=options), 'divergence')
    assert divergence[-1] < 0.75 * divergence[0]
