"""The GRPO recipe on sums, with the small real model and with a tiny model."""

from pathlib import Path

import pytest

from fixtures.recipe_runs import column, run_recipe
from fixtures.tiny_model import build_tiny_model

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
SHORT = ('--steps', '2', '--prompts', '2', '--completions', '6', '--held-out', '1', '--eval-every', '2')
"""Options for a run of two small steps."""


def test_reward_on_held_out_sums_rises_within_four_steps(tmp_path: Path) -> None:
    """The reward on held-out sums rises by more than 0.1; rewards are in [0, 1], and no sample is stale."""
    curve = run_recipe('grpo_arithmetic', tmp_path, options=('--steps', '4', '--held-out', '6', '--eval-every', '4'))
    first, last = column(curve, 'held_out_reward')
    assert last > first + 0.1
    assert column(curve, 'staleness') == [0.0] * 4
    assert all(0.0 <= reward <= 1.0 for reward in column(curve, 'reward'))
    assert all(0.5 < ratio < 2.0 for ratio in column(curve, 'train/token_ratio_mean'))


def test_curves_of_a_seed_are_bitwise_equal(tmp_path: Path) -> None:
    """Two runs with the same seed write equal bytes, and a run with another seed writes different bytes."""
    runs = [(tmp_path / 'first', 5), (tmp_path / 'again', 5), (tmp_path / 'other', 6)]
    for folder, seed in runs:
        curve = run_recipe('grpo_arithmetic', folder, seed=seed, options=(*SHORT, '--steps', '1'))
        assert min(column(curve, 'grad_norm')) > 0.1
    first, again, other = ((folder / 'curves.jsonl').read_bytes() for folder, _ in runs)
    assert first == again != other


def test_one_update_per_step_is_on_policy_with_each_engine(tmp_path: Path) -> None:
    """The probabilities of trainer and sampler agree within 1e-4 in each step, so no ratio is clipped."""
    model = str(build_tiny_model(tmp_path / 'model'))
    for engine in ('torch', 'vllm'):
        options = (*SHORT, '--model', model, '--engine', engine, '--updates', '1')
        curve = run_recipe('grpo_arithmetic', tmp_path / engine, options=options)
        assert all(abs(ratio - 1) < 1e-4 for ratio in column(curve, 'train/token_ratio_max'))
        assert column(curve, 'train/clip_ratio') == [0.0, 0.0]
