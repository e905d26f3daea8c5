"""The fine-tuning recipe: the small real model in process, and a tiny model in process and with the services."""

from pathlib import Path

import pytest

from fixtures.recipe_runs import column, run_recipe
from fixtures.tiny_model import build_tiny_model

pytestmark = pytest.mark.timeout(300)


@pytest.mark.slow
def test_answers_to_held_out_questions_contain_the_name(tmp_path: Path) -> None:
    """No answer to a held-out question contains the name before training; at least half contain it afterwards."""
    curve = run_recipe('sft_self_cognition', tmp_path)
    named, losses = column(curve, 'named'), column(curve, 'loss')
    assert named[0] == 0
    assert named[-1] >= 0.5
    assert losses[-1] < losses[0] / 2


@pytest.mark.slow
def test_losses_with_the_services_equal_those_in_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses with the services are bitwise equal to those of an in-process run, and decrease."""
    for name in ('TWINKLE_SERVER_URL', 'TWINKLE_API_KEY'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('TWINKLE_STATE_DIR', str(tmp_path / 'no-stack'))
    model = build_tiny_model(tmp_path / 'model')
    options = ('--model', str(model), '--epochs', '2', '--learning-rate', '1e-2')
    local = run_recipe('sft_self_cognition', tmp_path / 'local', seed=4, options=options)
    remote = run_recipe('sft_self_cognition', tmp_path / 'remote', seed=4, options=(*options, '--where', 'services'))
    assert column(remote, 'loss') == column(local, 'loss')
    assert len(column(local, 'loss')) == 8
    assert column(local, 'loss')[-1] < column(local, 'loss')[0] - 1
