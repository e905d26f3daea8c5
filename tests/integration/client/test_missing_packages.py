"""Messages of programs whose libraries are not installed."""

import subprocess
import sys

import pytest

from twinkle_client.stack import SERVICES, StackError
from twinkle_client.stack.packages import check_packages
from twinkle_services.commands import missing_package

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
    message = f"twinkle-{service}: the package pydantic is missing: pip install 'twinkle-grpc[{service}]'"
    assert (done.returncode, done.stderr) == (1, missing_package(service, 'pydantic') + '\n')
    assert missing_package(service, 'pydantic', (3, 13)) == message


@pytest.mark.parametrize(('service', 'is_tested'), [('model', False), ('sampler', False), ('gateway', True)])
def test_program_names_the_tested_versions_of_python(service: str, *, is_tested: bool) -> None:
    """Messages of the services with torch name the tested versions if the version of Python is newer."""
    message = missing_package(service, 'numpy', (3, 14))
    note = '' if is_tested else ' (tested with Python 3.11 to 3.13; this is 3.14)'
    assert message.endswith(f"pip install 'twinkle-grpc[{service}]'{note}")


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
    with pytest.raises(StackError, match=r"missing \(no_such_library\): pip install 'twinkle-grpc\[all\]'$"):
        check_packages(['json', 'no_such_library'], (3, 13))
    with pytest.raises(StackError, match=r"\[all\]' \(tested with Python 3.11 to 3.13; this is 3.14\)$"):
        check_packages(['no_such_library'], (3, 14))
