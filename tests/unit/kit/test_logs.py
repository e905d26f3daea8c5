"""Log lines of a service whose disk is full."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import logging, resource, structlog
from services.kit.telemetry import TelemetryConfig, start_telemetry
start_telemetry(TelemetryConfig(is_log_json=IS_JSON), service='test')
log = structlog.get_logger('test')
log.error('before')
resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
for _ in range(3000):
    log.error('lost', reason='x' * 100)
    logging.getLogger('library').error('lost')
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
for _ in range(3):
    log.error('after')
print('done')
"""


def test_full_disk_fails_no_log_call(tmp_path: Path) -> None:
    """Log calls succeed while the log file cannot be written, and lines are written again afterwards."""
    for is_json in (False, True):
        path = tmp_path / f'{is_json}.log'
        program = PROGRAM.replace('IS_JSON', str(is_json))
        with path.open('wb') as log:
            command = [sys.executable, '-c', program]
            found = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, timeout=60, check=True)
        assert found.stdout == b'done\n'
        lines = path.read_text()
        assert 'before' in lines
        assert 'after' in lines
