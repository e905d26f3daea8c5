"""The built wheel: its packages and programs, and all services from a folder with another package named `services`."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures.documented import DOCUMENTED_MODEL, blocks, program_of
from fixtures.source_tree import ROOT
from fixtures.tiny_model import build_tiny_model
from twinkle_client.stack import SERVICES

pytestmark = pytest.mark.timeout(300)
PAGE = 'docs/do/own-data.md'
SHADOW = "raise ImportError('the package of the user was imported')\n"
"""Package of a user with the name of the repository's folder of services."""


class Installed:
    """The wheel, installed into a folder, and a user's folder from which its programs run."""

    def __init__(self, folder: Path) -> None:
        self.target = folder / 'installed'
        self.cwd = folder / 'project'
        (self.cwd / 'services').mkdir(parents=True)
        (self.cwd / 'services' / '__init__.py').write_text(SHADOW)
        build = [sys.executable, '-m', 'hatchling', 'build', '--target', 'wheel', '--directory', str(folder)]
        subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
        (wheel,) = folder.glob('*.whl')
        options = ['--quiet', '--no-deps', '--no-index', '--no-compile', '--target', str(self.target)]
        subprocess.run([sys.executable, '-m', 'pip', 'install', *options, str(wheel)], check=True)

    def run(self, program: str, *arguments: str) -> 'subprocess.CompletedProcess[str]':
        """Run a program of the wheel with the libraries of this environment, in the user's folder."""
        variables = {**os.environ, 'PYTHONPATH': str(self.target), 'TWINKLE_STATE_DIR': str(self.cwd / 'state')}
        path = sys.executable if program == 'python' else str(self.target / 'bin' / program)
        return subprocess.run(
            [path, *arguments], cwd=self.cwd, env=variables, capture_output=True, text=True, check=False
        )


@pytest.fixture(scope='module')
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """The installed wheel; a stack that a test starts is stopped at the end."""
    wheel = Installed(tmp_path_factory.mktemp('wheel'))
    yield wheel
    wheel.run('twinkle', 'down')


def test_wheel_has_three_packages(installed: Installed) -> None:
    """No top-level name of the wheel is a common word, and every service has a program."""
    names = {path.name for path in installed.target.iterdir() if not path.name.endswith('.dist-info')}
    assert names == {'bin', 'twinkle', 'twinkle_client', 'twinkle_services'}
    programs = {path.name for path in (installed.target / 'bin').iterdir()}
    assert programs == {'twinkle', *(f'twinkle-{service}' for service in SERVICES)}


@pytest.mark.parametrize('service', SERVICES)
def test_program_of_a_service_prints_its_fields(installed: Installed, service: str) -> None:
    """The program runs the code of the wheel, even if the user has a package named `services`."""
    done = installed.run(f'twinkle-{service}', '--help')
    assert (done.returncode, done.stderr) == (0, '')
    assert done.stdout.startswith(f'usage: twinkle-{service} [-h]')


@pytest.mark.slow
def test_documented_commands_train_an_adapter(installed: Installed, tmp_path: Path) -> None:
    """The commands of deploy/README.md start all services, and a documented program trains and downloads an adapter."""
    _, start, train = commands_of('Without a checkout')
    model = str(build_tiny_model(tmp_path / 'model'))
    started = installed.run(*start.split(), '--model', model, '--engine', 'torch')
    assert started.returncode == 0, started.stderr
    for block in blocks():
        if block.page == PAGE and block.title:
            (installed.cwd / block.title).write_text(block.text)
    interpreter, program = train.split()
    (installed.cwd / program).write_text(program_of(PAGE).replace(repr(DOCUMENTED_MODEL), repr(model)))
    done = installed.run(interpreter, program)
    assert done.returncode == 0, done.stderr
    assert (installed.cwd / 'shop-adapter' / 'adapter_model.safetensors').stat().st_size > 0


def commands_of(section: str) -> list[str]:
    """Return the shell commands in a section of deploy/README.md, without their comments."""
    text = (ROOT / 'deploy' / 'README.md').read_text().partition(f'## {section}\n')[2]
    block = text.partition('```sh\n')[2].partition('```')[0]
    return [line.partition('#')[0].strip() for line in block.splitlines()]
