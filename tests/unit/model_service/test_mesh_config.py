"""Meshes of the model service are checked before a model is loaded."""

from typing import Any

import pytest
from pydantic import ValidationError

from services.model.config import ModelConfig

REQUIRED = {'base_model': 'org/tiny', 'checkpoint_address': 'localhost:1', 'listen': '127.0.0.1:0'}


def test_counts_of_processes_and_passes() -> None:
    """Processes along `tp` and `pp` run one pass together, and those along `dp` run different passes."""
    config = ModelConfig(**REQUIRED, backend='megatron', mesh={'dp': 2, 'tp': 3, 'pp': 2})
    assert (config.mesh.process_count, config.mesh.pass_count) == (12, 2)


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({'mesh': {'tp': 2}}, "tp and pp require backend: 'megatron'"),
        ({'mesh': {'fsdp': 2, 'pp': 2}, 'backend': 'megatron'}, 'fsdp does not compose with tp and pp'),
        ({'mesh': {'fsdp': 2}, 'backend': 'megatron'}, 'mesh.fsdp: not supported'),
        ({'backend': 'megatron', 'full_parameters': True, 'patches': {'p': {}}}, 'patches and full_parameters: not'),
    ],
)
def test_unsuitable_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    """Settings that cannot be combined are refused by an error that names them."""
    with pytest.raises(ValidationError, match=message):
        ModelConfig(**REQUIRED, **settings)
