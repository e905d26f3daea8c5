"""Log lines of a service: their form, their loss while the disk is full, and the rotation of log files."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.tiers import mostly_slow

PROGRAM = """
import logging, resource, structlog
from twinkle_services.kit.telemetry import TelemetryConfig, start_telemetry
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
from twinkle_services.kit.telemetry import TelemetryConfig, start_telemetry
start_telemetry(TelemetryConfig(is_log_json=IS_JSON), service='test')
structlog.get_logger().warning('own line')
logging.getLogger('library').info('not logged')
try:
    raise ValueError('the cause')
except ValueError:
    logging.getLogger('library').exception('line %d of a library', 7)
"""


def test_lines_of_libraries_have_the_form_of_own_lines() -> None:
    """Lines of the standard library's loggers have the format and the fields of the service's own lines."""
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


WRITERS = {
    'structlog': "log.error('lost', text=text)",
    'native': "os.write(1, text.encode() + b'\\n')",
    'child': "subprocess.run(['/bin/sh', '-c', f'echo {text}; echo {text} >&2'], check=True)",
}
"""Statements that write a line to the log of a process."""

WRITING_PROGRAM = """
import os, subprocess, time, structlog
from pathlib import Path
from twinkle_services.kit.telemetry import TelemetryConfig, start_telemetry
path, limit_bytes = Path('PATH'), LIMIT
start_telemetry(TelemetryConfig(log_file=path, log_file_bytes=limit_bytes), service='test')
log = structlog.get_logger('test')
for number in range(40):
    text = f'line-{number}-' + 'x' * 1000
    WRITE
    while path.stat().st_size > limit_bytes:
        time.sleep(0.01)
"""


@pytest.mark.parametrize('writer', mostly_slow(WRITERS))
def test_log_file_keeps_the_newest_lines_in_two_bounded_files(tmp_path: Path, writer: str) -> None:
    """Two files of about the configured size contain the newest lines of a process, its libraries and its children."""
    path, limit_bytes = tmp_path / 'logs' / 'service.log', 8192
    program = WRITING_PROGRAM.replace('PATH', str(path)).replace('LIMIT', str(limit_bytes))
    command = [sys.executable, '-c', program.replace('WRITE', WRITERS[writer])]
    assert subprocess.run(command, capture_output=True, timeout=60, check=True).stderr == b''
    files = {file.name: file.read_text() for file in path.parent.iterdir()}
    assert files.keys() == {'service.log', 'service.log.old'}
    assert max(map(len, files.values())) < limit_bytes + 4096
    numbers = [int(found) for found in re.findall(r'line-(\d+)-', files['service.log.old'] + files['service.log'])]
    assert sorted(set(numbers)) == list(range(min(numbers), 40))


def test_log_file_that_cannot_be_rotated_fails_no_log_call(tmp_path: Path) -> None:
    """Log calls succeed although the previous file cannot be replaced."""
    path = tmp_path / 'service.log'
    (tmp_path / 'service.log.old' / 'folder').mkdir(parents=True)
    program = WRITING_PROGRAM.replace('PATH', str(path)).replace('LIMIT', '4096').replace('WRITE', WRITERS['structlog'])
    program = program.replace('while path.stat().st_size > limit_bytes:', 'if number == 20:').replace('0.01', '2')
    subprocess.run([sys.executable, '-c', program], capture_output=True, timeout=60, check=True)
    assert 'line-39-' in path.read_text()
