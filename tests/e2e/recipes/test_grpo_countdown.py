"""The GRPO recipe on the countdown game, with the small real model."""

from pathlib import Path

import pytest

from fixtures.recipe_runs import column, run_recipe

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


def test_reward_on_held_out_games_rises_within_four_steps(tmp_path: Path) -> None:
    """The mean reward on held-out games rises by more than 0.15.

    At the end, more answers have the required format than the correct result. Rewards are in [0, 1], and no sample is
    stale.
    """
    options = ('--steps', '4', '--held-out', '6', '--held-out-completions', '1', '--eval-every', '4')
    curve = run_recipe('grpo_countdown', tmp_path, options=options)
    first, last = column(curve, 'held_out_reward')
    assert last > first + 0.15
    assert column(curve, 'held_out_format')[-1] > column(curve, 'held_out_accuracy')[-1]
    assert column(curve, 'staleness') == [0.0] * 4
    assert all(0.0 <= reward <= 1.0 for reward in column(curve, 'reward'))
