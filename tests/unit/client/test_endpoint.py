"""Which server is called: what is given, else the environment, else the local stack."""

import os
from pathlib import Path

import pytest

from twinkle_client.endpoint import find_endpoint
from twinkle_client.rpc import Address
from twinkle_client.stack import ServiceState, StackState
from twinkle_client.stack.processes import start_mark
from twinkle_client.stack.state import key_path


@pytest.fixture(autouse=True)
def _no_server_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv('TWINKLE_SERVER_URL', raising=False)
    monkeypatch.delenv('TWINKLE_API_KEY', raising=False)
    monkeypatch.setenv('TWINKLE_STATE_DIR', str(tmp_path))


@pytest.mark.parametrize(
    ('text', 'target', 'is_secure'),
    [
        ('localhost:8000', 'localhost:8000', False),
        ('http://localhost:8000', 'localhost:8000', False),
        ('http://host:81/ignored/path', 'host:81', False),
        ('grpc://10.0.0.1', '10.0.0.1:8000', False),
        ('https://train.example', 'train.example:443', True),
        ('grpcs://train.example:9', 'train.example:9', True),
        ('[::1]:8000', '[::1]:8000', False),
    ],
)
def test_address_is_read_as_people_write_it(text: str, target: str, *, is_secure: bool) -> None:
    """Schemes, ports and paths are understood."""
    address = Address.parse(text)
    assert (address.target, address.is_secure) == (target, is_secure)


@pytest.mark.parametrize('text', ['', 'ftp://host:1', 'http://', 'host:port'])
def test_malformed_address_is_refused(text: str) -> None:
    """What is no address is a ValueError."""
    with pytest.raises(ValueError, match=r'address|[Pp]ort'):
        Address.parse(text)


def test_given_values_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments come before the environment."""
    monkeypatch.setenv('TWINKLE_SERVER_URL', 'other:1')
    monkeypatch.setenv('TWINKLE_API_KEY', 'tml-other')
    assert find_endpoint('host:2', 'tml-mine') == ('host:2', 'tml-mine')
    assert find_endpoint(None, '') == ('other:1', 'tml-other')


def test_local_stack_is_found(tmp_path: Path) -> None:
    """A running stack gives its address and key; its key goes to its own address only."""
    _pretend_stack(tmp_path, mark=start_mark(os.getpid()))
    assert find_endpoint(None, None) == ('127.0.0.1:4567', 'tml-local')
    assert find_endpoint('http://localhost:4567', None)[1] == 'tml-local'
    assert find_endpoint('elsewhere:1', None) == ('elsewhere:1', '')


def test_stack_that_ended_is_not_found(tmp_path: Path) -> None:
    """A process id that now belongs to another process does not count."""
    _pretend_stack(tmp_path, mark='0')
    with pytest.raises(ValueError, match='twinkle up'):
        find_endpoint(None, None)


def _pretend_stack(folder: Path, *, mark: str) -> None:
    key_path(folder).write_text('tml-local\n')
    service = ServiceState(name='gateway', pid=os.getpid(), start_mark=mark, address='127.0.0.1:4567', log_path='')
    StackState.create(folder, base_model='tiny', services=(service,)).save()
