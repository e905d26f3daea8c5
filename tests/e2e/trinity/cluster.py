"""A Ray cluster on this machine; a test starts and stops its processes."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from fixtures.faulty_service import free_port

_STOP_SECONDS = 20.0
"""Time in seconds after which a stopping cluster's processes are killed."""
_OPTIONS = {
    # 0 selects any free port.
    'port': '0',
    'dashboard-agent-listen-port': '0',
    'min-worker-port': '0',
    'max-worker-port': '0',
    'include-dashboard': 'false',
    # Trinity's actors reserve CPUs, although they mostly wait for the gateway.
    'num-cpus': '8',
    'object-store-memory': str(100 * 2**20),
}
"""Options of `ray start`, in addition to ports and folders that differ between clusters."""


@contextmanager
def running_ray(environment: Mapping[str, str], folder: Path) -> Iterator[str]:
    """Run a Ray cluster until the block ends, and yield its address.

    Args:
        environment: Environment variables of the cluster and of its actors.
        folder: Working folder of the actors.
    """
    # The path of a Unix socket has at most 107 bytes, so Ray's folder cannot be inside the folder of a test.
    state = tempfile.mkdtemp(prefix='ray-')
    fixed_ports = {'ray-client-server-port': str(free_port()), 'dashboard-port': str(free_port())}
    options = [f'--{name}={text}' for name, text in {**_OPTIONS, **fixed_ports, 'temp-dir': state}.items()]
    with subprocess.Popen(
        [sys.executable, '-u', '-m', 'ray.scripts.scripts', 'start', '--head', '--block', *options],
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # All processes of the cluster are in one process group, so that none of them remains.
        start_new_session=True,
    ) as process:
        try:
            yield _read_address(process)
        finally:
            _stop(process)
            shutil.rmtree(state, ignore_errors=True)


def _read_address(process: subprocess.Popen[str]) -> str:
    """Return the address that `ray start` prints when the cluster is ready."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if match := re.search(r"ray start --address='([^']+)'", line):
            return match[1]
    raise RuntimeError(f'ray start exited with status {process.wait()}:\n{"".join(lines)}')


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=_STOP_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
