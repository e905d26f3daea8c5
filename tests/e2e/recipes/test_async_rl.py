"""The asynchronous RL recipe on a tiny model."""

from pathlib import Path

import pytest

from fixtures.recipe_runs import column, run_recipe
from fixtures.tiny_model import build_tiny_model

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
OPTIONS = ('--steps', '24', '--prompts', '4', '--max-tokens', '16', '--learning-rate', '1e-2')
"""Sizes and rates for random weights. The recipe's own settings require a model that follows instructions."""


@pytest.mark.parametrize('max_staleness', [0, 1])
def test_reward_rises_and_staleness_stays_within_the_limit(tmp_path: Path, max_staleness: int) -> None:
    """The reward rises, samples are as stale as allowed, and the policies differ only if stale samples are allowed."""
    model = build_tiny_model(tmp_path / 'model')
    options = ('--model', str(model), '--max-staleness', str(max_staleness), *OPTIONS)
    curve = run_recipe('async_rl', tmp_path / 'out', options=options)
    assert column(curve, 'staleness') == [min(step, max_staleness) for step in range(24)]
    assert not any(column(curve, 'dropped'))
    rewards = column(curve, 'reward')
    assert sum(rewards[-3:]) > 3 * sum(rewards[:3])
    is_on_policy = [abs(ratio - 1) < 1e-4 for ratio in column(curve, 'sampler_ratio')]
    assert is_on_policy[0]
    assert all(is_on_policy) == (max_staleness == 0)
