"""Sampling beside training, as the recipe has it."""

from pathlib import Path

import pytest

from fixtures.recipe_runs import column, run_recipe
from fixtures.tiny_model import build_tiny_model

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
OPTIONS = ('--steps', '24', '--prompts', '4', '--max-tokens', '16', '--learning-rate', '1e-2')
"""What a model without knowledge needs; the recipe's own setting is for one that follows instructions."""


@pytest.mark.parametrize('bound', [0, 1])
def test_reward_rises_and_no_sample_is_older_than_the_bound(tmp_path: Path, bound: int) -> None:
    """Ages are as old as allowed and no older, and only samples of older weights differ from the trainer's."""
    model = build_tiny_model(tmp_path / 'model')
    options = ('--model', str(model), '--max-staleness', str(bound), *OPTIONS)
    curve = run_recipe('async_rl', tmp_path / 'out', options=options)
    assert column(curve, 'staleness') == [min(step, bound) for step in range(24)]
    assert not any(column(curve, 'dropped'))
    rewards = column(curve, 'reward')
    assert sum(rewards[-3:]) > 3 * sum(rewards[:3])
    is_on_policy = [abs(ratio - 1) < 1e-4 for ratio in column(curve, 'sampler_ratio')]
    assert is_on_policy[0]
    assert all(is_on_policy) == (bound == 0)
