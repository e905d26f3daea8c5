"""Tests of the settings of CPU libraries that keep the rows of a product independent."""

import os

import pytest
import torch

from twinkle.nn.cpu_products import _settings_of, has_independent_rows


@pytest.mark.parametrize(
    ('cpu', 'expected'),
    [
        ('vendor_id: GenuineIntel flags: avx2', {'MKL_CBWR': 'AUTO,STRICT'}),
        (
            'vendor_id: GenuineIntel flags: avx512_bf16 amx_tile',
            {'MKL_CBWR': 'AUTO,STRICT', 'ONEDNN_MAX_CPU_ISA': 'AVX512_CORE_BF16'},
        ),
        ('vendor_id: AuthenticAMD flags: avx2', {}),
        ('', {}),
    ],
)
def test_settings_depend_on_the_cpu(cpu: str, expected: dict[str, str]) -> None:
    """Only Intel CPUs need MKL's strict mode, and only CPUs with AMX need other bfloat16 kernels."""
    assert _settings_of(cpu) == expected


def test_rows_of_products_are_independent() -> None:
    """Rows of a float32 product do not depend on the number of rows."""
    assert has_independent_rows(torch.float32)


@pytest.mark.parametrize('name', ['MKL_CBWR', 'ONEDNN_MAX_CPU_ISA'])
def test_child_processes_do_not_inherit_the_settings(name: str) -> None:
    """The environment variables are set only while the libraries read them."""
    assert name not in os.environ
