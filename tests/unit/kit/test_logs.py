"""Log lines of a service: their form, and their loss while the disk is full."""

import json
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


FORMS = """
import logging, structlog
from services.kit.telemetry import TelemetryConfig, start_telemetry
start_telemetry(TelemetryConfig(is_log_json=IS_JSON), service='test')
structlog.get_logger().warning('own line')
logging.getLogger('library').info('not logged')
try:
    raise ValueError('the cause')
except ValueError:
    logging.getLogger('library').exception('line %d of a library', 7)
"""


def test_lines_of_libraries_have_the_form_of_own_lines() -> None:
    """Lines of the standard library's loggers are JSON objects if the service's own are, with the same fields."""
    own, library = map(json.loads, _stderr(FORMS.replace('IS_JSON', 'True')).splitlines())
    assert own.keys() <= library.keys()
    assert (library['event'], library['level'], library['logger']) == ('line 7 of a library', 'error', 'library')
    assert library['service'] == 'test'
    assert 'ValueError: the cause' in library['exception']
    text = _stderr(FORMS.replace('IS_JSON', 'False'))
    assert 'line 7 of a library' in text
    assert text.count('ValueError: the cause') == 1


def _stderr(program: str) -> str:
    command = [sys.executable, '-c', program]
    return subprocess.run(command, stderr=subprocess.PIPE, timeout=60, check=True, text=True).stderr
