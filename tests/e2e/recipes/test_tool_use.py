"""The tool-use recipe on the small real model."""

from pathlib import Path

import pytest

from fixtures.recipe_runs import column, run_recipe

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


def test_correct_calls_become_more_frequent(tmp_path: Path) -> None:
    """Two rounds raise the share of correct held-out chats by at least 0.3, and train on exactly the sampled tokens."""
    curve = run_recipe('tool_use', tmp_path, options=('--rounds', '2'))
    called, right = column(curve, 'called'), column(curve, 'right')
    assert right[-1] >= right[0] + 0.3
    assert called[-1] >= right[-1]
    learned = column(curve, 'learned_tokens')
    assert len(learned) == 2
    assert learned == [step['drawn_tokens'] for step in curve if 'learned_tokens' in step]
