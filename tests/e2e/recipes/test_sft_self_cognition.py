"""A model learns its name: the small real one in process, and a tiny one in both places with the same bits."""

from pathlib import Path

import pytest

from fixtures.recipe_runs import column, run_recipe
from fixtures.tiny_model import build_tiny_model

pytestmark = pytest.mark.timeout(300)


@pytest.mark.slow
def test_it_says_its_name_where_it_was_not_asked_before(tmp_path: Path) -> None:
    """Questions that were not trained on are answered with the name by most of the answers, by none before."""
    curve = run_recipe('sft_self_cognition', tmp_path)
    named, losses = column(curve, 'named'), column(curve, 'loss')
    assert named[0] == 0
    assert named[-1] >= 0.5
    assert losses[-1] < losses[0] / 2


def test_services_compute_what_the_process_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its parts imported from the client, the same loop has the same losses to the bit."""
    for name in ('TWINKLE_SERVER_URL', 'TWINKLE_API_KEY'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('TWINKLE_STATE_DIR', str(tmp_path / 'no-stack-is-here'))
    model = build_tiny_model(tmp_path / 'model')
    options = ('--model', str(model), '--epochs', '2', '--learning-rate', '1e-2')
    here = run_recipe('sft_self_cognition', tmp_path / 'here', seed=4, options=options)
    there = run_recipe('sft_self_cognition', tmp_path / 'there', seed=4, options=(*options, '--where', 'services'))
    assert column(there, 'loss') == column(here, 'loss')
    assert len(column(here, 'loss')) == 8
    assert column(here, 'loss')[-1] < column(here, 'loss')[0] - 1
