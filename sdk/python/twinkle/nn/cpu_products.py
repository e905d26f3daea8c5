"""Settings of CPU libraries that make each row of a matrix product independent of the other rows.

On Intel CPUs, MKL and oneDNN choose a kernel by the number of rows, so the bits of a row depend on the other rows. The
strict mode of MKL's reproducible results prevents this without a measured cost. oneDNN has no such mode, but only its
kernels for AMX depend on the number of rows; without them, bfloat16 products are as fast as float32 ones (docs/LOG.md).

Both libraries read their environment variables at the first product of the process. A program that has computed a
product before keeps its settings.
"""

import os
from pathlib import Path

import torch

from twinkle.infra import get_logger

_ROWS = 256
"""Number of rows of the tested products."""
_SHAPE = (1536, 576)
"""Inputs and outputs of a product whose rows depend on each other with the default settings of Intel CPUs."""


def choose_reproducible_kernels() -> None:
    """Select kernels whose rows are independent, and log a warning if float32 products already use other kernels.

    The variables MKL_CBWR and ONEDNN_MAX_CPU_ISA are respected if they are set. Otherwise they are set only while the
    libraries read them, so child processes do not inherit them.
    """
    settings = {name: value for name, value in _settings_of(_cpu_text()).items() if name not in os.environ}
    os.environ.update(settings)
    try:
        is_independent = has_independent_rows(torch.float32)
        has_independent_rows(torch.bfloat16)
    finally:
        for name in settings:
            del os.environ[name]
    if not is_independent:
        get_logger().warning(
            'rows of a product depend on each other on this CPU, so the results of a batch depend on other batches in '
            'its passes; import twinkle.nn before the first product of the program, and leave MKL_CBWR unset'
        )


def _settings_of(cpu: str) -> dict[str, str]:
    """Return the environment variables for a CPU, by the text of /proc/cpuinfo."""
    settings: dict[str, str] = {}
    if 'GenuineIntel' in cpu:
        settings['MKL_CBWR'] = 'AUTO,STRICT'
    if 'amx_tile' in cpu:
        settings['ONEDNN_MAX_CPU_ISA'] = 'AVX512_CORE_BF16'
    return settings


def _cpu_text() -> str:
    """Return the description of the CPU; an empty text on systems other than Linux."""
    path = Path('/proc/cpuinfo')
    return path.read_text() if path.exists() else ''


def has_independent_rows(dtype: torch.dtype) -> bool:
    """Return whether rows of two test products are bitwise the same if fewer other rows are computed with them."""
    inputs, outputs = _SHAPE
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_ROWS, inputs, generator=generator).to(dtype)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    swapped_x, swapped_weight = x[:, :outputs].contiguous(), weight.T.contiguous()
    pairs = ((x, weight), (swapped_x, swapped_weight))
    return all(torch.equal((a @ b.T)[:count], a[:count].clone() @ b.T) for a, b in pairs for count in (16, 17, 64))
