"""Description of the machine that ran the benchmarks."""

import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

LIBRARIES = ('grpcio', 'numpy', 'protobuf', 'torch', 'transformers')


def describe_hardware() -> dict[str, Any]:
    """Return the processor, memory, accelerators, load, and versions of the relevant libraries."""
    return {
        'processor': _processor(),
        'cores': len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count(),
        'memory_gib': round(os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30, 1),
        'accelerators': _accelerators(),
        'system': platform.platform(terse=True),
        'python': platform.python_version(),
        'libraries': dict(_versions()),
        'load_average': [round(load, 2) for load in os.getloadavg()],
    }


def _versions() -> Iterator[tuple[str, str]]:
    for name in LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            yield name, metadata.version(name)


def _processor() -> str:
    listing = Path('/proc/cpuinfo')
    if listing.exists():
        for line in listing.read_text(encoding='utf-8').splitlines():
            if line.startswith('model name'):
                return line.partition(':')[2].strip()
    return platform.processor() or platform.machine()


def _accelerators() -> list[str]:
    try:
        listing = subprocess.run(
            ['nvidia-smi', '--query-gpu=name,memory.total', '--format=csv,noheader'],  # noqa: S607 (its path differs between systems)
            check=True,
            capture_output=True,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return []
    return listing.stdout.splitlines()
