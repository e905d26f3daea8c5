"""Messages of programs whose libraries are not installed."""

import subprocess
import sys

import pytest

from twinkle.installation import install_command
from twinkle_client.stack import SERVICES, StackError
from twinkle_client.stack.packages import check_packages

HIDE = 'import sys; sys.modules[{module!r}] = None; from twinkle_services import commands; commands.{service}()'
"""Program that starts a service without a module that all services need."""


@pytest.mark.parametrize('service', SERVICES)
def test_program_of_a_service_names_its_extra(service: str) -> None:
    """A service that lacks a library exits with one line, which names the library and the extra to install."""
    done = subprocess.run(
        [sys.executable, '-c', HIDE.format(service=service, module='pydantic')],
        capture_output=True,
        text=True,
        check=False,
    )
    message = f'twinkle-{service}: the package pydantic is missing: {install_command(service)}\n'
    assert (done.returncode, done.stderr) == (1, message)


@pytest.mark.parametrize(('extra', 'is_tested'), [('model', False), ('sampler', False), ('all', False), ('data', True)])
def test_command_names_the_tested_versions_of_python(extra: str, *, is_tested: bool) -> None:
    """The command for an extra with torch names the tested versions if the version of Python is newer."""
    command = f"pip install 'twinkle-grpc[{extra}]'"
    note = '' if is_tested else ' (tested with Python 3.11 to 3.13; this is 3.14)'
    assert install_command(extra, (3, 13)) == command
    assert install_command(extra, (3, 14)) == command + note


def test_program_of_a_service_shows_an_error_in_its_own_code() -> None:
    """A missing module of this project is an error of the installation, so no extra is named."""
    program = HIDE.format(service='data', module='twinkle_services.kit.config')
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert 'pip install' not in done.stderr
    assert done.stderr.splitlines()[-1].startswith('ModuleNotFoundError: import of twinkle_services.kit.config')


def test_stack_is_refused_without_the_libraries_of_its_services() -> None:
    """Missing libraries are named together with the command that installs them."""
    check_packages()
    with pytest.raises(StackError, match=r"missing \(no_such_library\): pip install 'twinkle-grpc\[all\]'"):
        check_packages(['json', 'no_such_library'])
