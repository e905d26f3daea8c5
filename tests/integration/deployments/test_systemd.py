"""The units of systemd are valid, and start the services with the example configurations."""

import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from fixtures.service_configs import SERVICES, loaded_config
from fixtures.source_tree import ROOT

FOLDER = ROOT / 'deploy/systemd'
UNITS = sorted(path.name for path in FOLDER.iterdir() if path.suffix in {'.service', '.target'})
PROGRAMS = '/opt/twinkle/bin'


def test_every_service_has_a_unit() -> None:
    """Each service has a unit, and the target has a unit file."""
    assert set(UNITS) == {'twinkle.target', *(f'twinkle-{service}.service' for service in SERVICES)}


def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    """`systemd-analyze verify` reports no unknown setting, invalid value or missing program."""
    program = shutil.which('systemd-analyze')
    if program is None:
        fail_or_skip = pytest.fail if os.environ.get('CI') else pytest.skip
        fail_or_skip('systemd-analyze is missing; install systemd (for example: apt-get install systemd)')
    for name in UNITS:
        text = (FOLDER / name).read_text()
        (tmp_path / name).write_text(text.replace(PROGRAMS, sysconfig.get_path('scripts')))
    verify = [program, 'verify', *(str(tmp_path / name) for name in UNITS)]
    done = subprocess.run(verify, capture_output=True, text=True, check=False)
    lines = [line for line in done.stderr.splitlines() if 'twinkle' in line]
    assert (done.returncode, lines) == (0, [])


@pytest.mark.parametrize('service', SERVICES)
def test_command_of_a_unit_loads_its_configuration(service: str) -> None:
    """The command starts the service with its example, whose state folder the unit creates, and can drain in time."""
    unit = _settings(service)
    program, option, path = shlex.split(unit['ExecStart'])
    assert program == f'{PROGRAMS}/twinkle-{service}'
    assert (option, path) == ('--config', f'/etc/twinkle/{service}.yaml')
    variables = dict(word.split('=', 1) for word in unit['Environment'].split())
    file = ROOT / 'deploy/config' / Path(path).name
    config = loaded_config(service, variables, ['--config', str(file)])
    assert str(config.state_dir) in [f'/var/lib/{name}' for name in unit['StateDirectory'].split()]
    assert config.drain_seconds < float(unit['TimeoutStopSec'])
    assert variables['HF_HOME'] == f'/var/cache/{unit["CacheDirectory"]}'


def test_units_share_a_user() -> None:
    """All services run as the user that sysusers creates, because shared memory belongs to a user."""
    (line,) = [line for line in (FOLDER / 'twinkle.sysusers.conf').read_text().splitlines() if not line.startswith('#')]
    assert re.match(r'u (\S+) - ', line)
    assert {_settings(service)['User'] for service in SERVICES} == {line.split()[1]}


def _settings(service: str) -> dict[str, str]:
    """Return the settings of the section `Service`; comments and other sections are left out."""
    section = (FOLDER / f'twinkle-{service}.service').read_text().partition('[Service]\n')[2].partition('\n[')[0]
    lines = [line for line in section.splitlines() if line and not line.startswith('#')]
    return {name: value for name, _, value in (line.partition('=') for line in lines)}
