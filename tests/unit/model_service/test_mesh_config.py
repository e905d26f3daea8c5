"""The meshes of the model service are checked before the model is loaded."""

from typing import Any

import pytest
from pydantic import ValidationError

from twinkle_services.model import replay
from twinkle_services.model.assembly import replay_environment
from twinkle_services.model.config import ModelConfig

REQUIRED = {'base_model': 'org/tiny', 'checkpoint_address': 'localhost:1', 'listen': '127.0.0.1:0'}


def test_counts_of_processes_and_passes() -> None:
    """All ranks of a mesh are processes; ranks that divide layers or rows run one pass together."""
    config = ModelConfig(**REQUIRED, backend='megatron', mesh={'dp': 2, 'tp': 3, 'pp': 2})
    assert (config.mesh.process_count, config.mesh.pass_count) == (12, 2)
    config = ModelConfig(**REQUIRED, mesh={'dp': 2, 'fsdp': 2, 'ulysses': 4})
    assert (config.mesh.process_count, config.mesh.pass_count) == (16, 4)


@pytest.mark.parametrize(('axis', 'name'), [('tp', 'layer_parts'), ('ulysses', 'row_parts')])
def test_axes_that_change_the_rounding_are_recorded(axis: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The replay environment contains the size of a `tp` or `ulysses` axis, and the replay tool refuses the mesh."""
    config = ModelConfig(**REQUIRED, backend='megatron' if axis == 'tp' else 'transformers', mesh={axis: 2})
    assert replay_environment(config)[name] == 2
    given = {**REQUIRED, 'backend': config.backend, f'mesh.{axis}': 2}
    settings = [argument for field, value in given.items() for argument in ('--set', f'{field}={value}')]
    assert replay.main(['--journal', 'never-read', *settings]) == 2
    assert f'mesh.{axis} > 1' in capsys.readouterr().out


def test_mesh_of_full_parameter_runs_is_recorded() -> None:
    """The replay environment contains the mesh only if FSDP divides full-parameter runs."""
    for settings, expected in (
        ({'mesh': {'dp': 2, 'fsdp': 2}}, 'tree'),
        ({'mesh': {'dp': 2}, 'full_parameters': True}, 'tree'),
        ({'mesh': {'dp': 2, 'fsdp': 2}, 'full_parameters': True}, 'dp 2, fsdp 2'),
    ):
        assert replay_environment(ModelConfig(**REQUIRED, **settings))['full_gradient_sum'] == expected


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({'mesh': {'tp': 2}}, "tp and pp require backend: 'megatron'"),
        ({'mesh': {'fsdp': 2, 'pp': 2}, 'backend': 'megatron'}, 'fsdp does not compose with tp and pp'),
        ({'mesh': {'ulysses': 2, 'tp': 2}, 'backend': 'megatron'}, 'ulysses does not compose with tp and pp'),
        ({'mesh': {'fsdp': 2}, 'backend': 'megatron'}, 'mesh.fsdp: not supported'),
        ({'mesh': {'ulysses': 2}, 'backend': 'megatron'}, 'mesh.ulysses: not supported'),
        ({'mesh': {'ulysses': 2}, 'full_parameters': True}, 'full_parameters: not supported with mesh.ulysses'),
        ({'backend': 'megatron', 'full_parameters': True, 'patches': {'p': {}}}, 'patches and full_parameters: not'),
    ],
)
def test_unsuitable_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    """The error for settings that cannot be combined names these settings."""
    with pytest.raises(ValidationError, match=message):
        ModelConfig(**REQUIRED, **settings)
