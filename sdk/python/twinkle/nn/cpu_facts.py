"""Facts about the CPU of this machine that decide how matrices are multiplied."""

from functools import cache
from pathlib import Path


def has_fast_bfloat16(cpu: str) -> bool:
    """Return whether a CPU multiplies bfloat16 faster than float32, by its description in /proc/cpuinfo.

    Intel's CPUs do so only with AMX: their AVX-512 instructions are slower for bfloat16 than for float32.
    """
    return has_amx(cpu) or ('avx512_bf16' in cpu and 'GenuineIntel' not in cpu)


def has_amx(cpu: str) -> bool:
    """Return whether a CPU has AMX, Intel's matrix unit for half precision."""
    return 'amx_bf16' in cpu


def has_faster_onednn(cpu: str) -> bool:
    """Return whether oneDNN multiplies float32 faster than MKL.

    MKL uses its kernels for AVX-512 only on Intel's CPUs; oneDNN uses its own on all CPUs that have AVX-512.
    """
    return 'avx512f' in cpu and 'GenuineIntel' not in cpu


@cache
def cpu_text() -> str:
    """Return the description of this machine's CPUs; an empty text on systems other than Linux."""
    path = Path('/proc/cpuinfo')
    return path.read_text() if path.exists() else ''
