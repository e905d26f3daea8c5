"""GRPO on sums, as the recipe has it, with the small real model."""

from pathlib import Path

import pytest

from fixtures.recipe_runs import column, run_recipe
from fixtures.tiny_model import build_tiny_model

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
SHORT = ('--steps', '2', '--prompts', '2', '--completions', '6', '--held-out', '1', '--eval-every', '2')


def test_reward_on_held_out_sums_rises_within_four_steps(tmp_path: Path) -> None:
    """By more than 0.1 of 1 on sums that are never trained on, from samples that are never stale."""
    curve = run_recipe('grpo_arithmetic', tmp_path, options=('--steps', '4', '--held-out', '6', '--eval-every', '4'))
    first, last = column(curve, 'held_out_reward')
    assert last > first + 0.1
    assert column(curve, 'staleness') == [0.0] * 4
    assert all(0.0 <= reward <= 1.0 for reward in column(curve, 'reward'))
    assert all(0.5 < ratio < 2.0 for ratio in column(curve, 'train/token_ratio_mean'))


def test_a_seed_gives_the_same_curve_to_the_bit(tmp_path: Path) -> None:
    """Two processes that learn write the same bytes; another seed writes others."""
    places = [(tmp_path / 'first', 5), (tmp_path / 'again', 5), (tmp_path / 'other', 6)]
    for place, seed in places:
        curve = run_recipe('grpo_arithmetic', place, seed=seed, options=(*SHORT, '--steps', '1'))
        assert min(column(curve, 'grad_norm')) > 0.1
    first, again, other = ((place / 'curves.jsonl').read_bytes() for place, _ in places)
    assert first == again != other


def test_one_update_a_step_is_on_policy_with_either_engine(tmp_path: Path) -> None:
    """The trainer's probabilities of what was sampled are the sampler's, to 1e-4, after every sync."""
    model = str(build_tiny_model(tmp_path / 'model'))
    for engine in ('torch', 'vllm'):
        options = (*SHORT, '--model', model, '--engine', engine, '--updates', '1')
        curve = run_recipe('grpo_arithmetic', tmp_path / engine, options=options)
        assert all(abs(ratio - 1) < 1e-4 for ratio in column(curve, 'train/token_ratio_max'))
        assert column(curve, 'train/clip_ratio') == [0.0, 0.0]
