"""Available memory of the device, the machine or its container."""

from pathlib import Path

import torch

_MEMINFO = Path('/proc/meminfo')
_CGROUP = Path('/sys/fs/cgroup')


def available_bytes(device_type: str = 'cpu') -> int:
    """Return the memory that can be allocated now, in bytes.

    Args:
        device_type: torch's name of the device type. 'cuda' is the current GPU; all other names mean the host's memory.

    Raises:
        OSError: the operating system does not report the available memory.
    """
    if device_type == 'cuda':
        free, _ = torch.cuda.mem_get_info()
        return free
    return min(_host_bytes(), _container_bytes())


def _host_bytes() -> int:
    for line in _MEMINFO.read_text().splitlines():
        name, _, rest = line.partition(':')
        if name == 'MemAvailable':
            return int(rest.split()[0]) * 1024
    raise OSError(f'{_MEMINFO} does not report the available memory')


def _container_bytes() -> int:
    """Return the memory left within the container's limit; without a limit, a number above any machine's memory."""
    unlimited = 1 << 62
    try:
        limit = (_CGROUP / 'memory.max').read_text().strip()
        used = (_CGROUP / 'memory.current').read_text().strip()
    except OSError:
        return unlimited
    return unlimited if limit == 'max' else max(0, int(limit) - int(used))
