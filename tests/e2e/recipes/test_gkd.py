"""The distillation recipe on the small real model, and between two tiny models with different weights."""

from pathlib import Path

import pytest

from fixtures.recipe_runs import Curve, column, run_recipe, run_seeds
from fixtures.tiny_model import build_tiny_model

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
SEEDS = (0, 1, 2)


@pytest.fixture(scope='module')
def curves(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Curve]:
    """Curves of all seeds."""
    return run_seeds('gkd', tmp_path_factory.mktemp('out'), SEEDS)


@pytest.mark.parametrize('seed', SEEDS)
def test_divergence_on_held_out_questions_falls(seed: int, curves: dict[int, Curve]) -> None:
    """Training on the student's answers lowers the divergence from the teacher to below 0.6 of its first value."""
    divergence = column(curves[seed], 'divergence')
    assert divergence[-1] < 0.6 * divergence[0]


def test_divergence_falls_with_the_answers_of_a_different_teacher(tmp_path: Path) -> None:
    """Training on the answers of a teacher with other weights (`--on-policy 0`) lowers the divergence."""
    models = [build_tiny_model(tmp_path / f'model_{seed}', seed=seed) for seed in (0, 1)]
    sizes = ('--model', str(models[0]), '--teacher', str(models[1]), '--steps', '15', '--prompts', '8')
    options = (*sizes, '--learning-rate', '5e-3', '--on-policy', '0')
    divergence = column(run_recipe('gkd', tmp_path / 'out', options=options), 'divergence')
    assert divergence[-1] < 0.75 * divergence[0]
