"""Tests of the device and the data type in which frozen weights are loaded."""

import json
from pathlib import Path
from typing import Any

import pytest

from twinkle.nn import PackedCausalLM, chosen_dtype
from twinkle.nn.cpu_facts import cpu_text, has_fast_bfloat16
from twinkle.nn.precision import declared_dtype


def folder_of(tmp_path: Path, **config: Any) -> Path:
    """Return a model folder that contains only a configuration."""
    (tmp_path / 'config.json').write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ('config', 'expected'),
    [
        ({'dtype': 'bfloat16'}, 'bfloat16'),
        ({'torch_dtype': 'float16'}, 'float16'),
        ({'text_config': {'dtype': 'bfloat16'}}, 'bfloat16'),
        ({'dtype': None, 'text_config': None}, 'float32'),
        ({}, 'float32'),
    ],
)
def test_declared_dtype_is_read_from_the_configuration(tmp_path: Path, config: dict[str, Any], expected: str) -> None:
    """The dtype is that of the model or its text model, with the new or the old field name, or else float32."""
    assert declared_dtype(folder_of(tmp_path, **config)) == expected


@pytest.mark.parametrize(
    ('cpu', 'expected'),
    [
        ('GenuineIntel avx512_bf16 amx_bf16 amx_tile', True),
        ('AuthenticAMD avx512_bf16', True),
        ('GenuineIntel avx512_bf16', False),
        ('AuthenticAMD avx2', False),
        ('', False),
    ],
)
def test_fast_bfloat16_depends_on_the_instructions_of_the_cpu(cpu, expected):
    """Bfloat16 is fast with AMX, and with the AVX-512 instructions of AMD's CPUs."""
    assert has_fast_bfloat16(cpu) is expected


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
def test_a_given_dtype_is_not_changed(tmp_path: Path, dtype: str) -> None:
    """A dtype other than 'auto' is returned unchanged, even if the folder has no model."""
    assert chosen_dtype(dtype, tmp_path, device='cpu') == dtype


@pytest.mark.parametrize('stored', ['float32', 'bfloat16', 'float16'])
def test_auto_is_bfloat16_for_half_precision_on_fast_hardware(tmp_path: Path, stored: str) -> None:
    """The dtype 'auto' keeps float32 models; for other models, it depends on the hardware."""
    is_fast = stored != 'float32' and has_fast_bfloat16(cpu_text())
    folder = folder_of(tmp_path, dtype=stored)
    assert chosen_dtype('auto', folder, device='cpu') == ('bfloat16' if is_fast else 'float32')
    assert chosen_dtype('auto', folder, device='meta') == 'float32'


@pytest.mark.parametrize('device', ['auto', 'gpu', 'cpu:x', ''])
def test_unknown_devices_are_refused_before_the_weights_are_read(tmp_path: Path, device: str) -> None:
    """The error for a device that torch does not know names the device, even if the folder has no model."""
    with pytest.raises(ValueError, match=f"device '{device}' is not known to torch; use 'cpu'"):
        PackedCausalLM.load(tmp_path, device=device)
