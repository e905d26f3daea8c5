"""Selection of the server: the given address, else the address in the environment, else the local stack."""

import os
from pathlib import Path

import pytest

from twinkle_client import TwinkleClient
from twinkle_client.endpoint import Endpoint, find_console_endpoint, find_endpoint, find_http_endpoint
from twinkle_client.rpc import Address
from twinkle_client.stack import ServiceState, StackState
from twinkle_client.stack.process_ids import start_mark
from twinkle_client.stack.state import key_path


@pytest.fixture(autouse=True)
def _no_server_configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv('TWINKLE_SERVER_URL', raising=False)
    monkeypatch.delenv('TWINKLE_API_KEY', raising=False)
    monkeypatch.delenv('TWINKLE_CA', raising=False)
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
def test_address_is_parsed(text: str, target: str, *, is_secure: bool) -> None:
    """Schemes, ports, paths and IPv6 addresses are accepted."""
    address = Address.parse(text)
    assert (address.target, address.is_secure) == (target, is_secure)


@pytest.mark.parametrize('text', ['', 'ftp://host:1', 'http://', 'host:port', 'host:99999'])
def test_malformed_address_is_refused(text: str) -> None:
    """A malformed address raises ValueError."""
    with pytest.raises(ValueError, match='address'):
        Address.parse(text)


def test_arguments_override_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments take precedence over environment variables; an empty key counts as unset."""
    monkeypatch.setenv('TWINKLE_SERVER_URL', 'other:1')
    monkeypatch.setenv('TWINKLE_API_KEY', 'tml-other')
    assert find_endpoint('host:2', 'tml-mine') == Endpoint('host:2', 'tml-mine')
    assert find_endpoint(None, '') == Endpoint('other:1', 'tml-other')


def test_local_stack_is_found(tmp_path: Path) -> None:
    """A running stack provides its address and key; the key is used only for the stack's address."""
    _write_stack_state(tmp_path, mark=start_mark(os.getpid()))
    assert find_endpoint(None, None) == Endpoint('127.0.0.1:4567', 'tml-local')
    assert find_endpoint('http://localhost:4567', None).api_key == 'tml-local'
    assert find_endpoint('elsewhere:1', None) == Endpoint('elsewhere:1', '')


def test_stack_is_found_over_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running stack provides its HTTP address and key; a key from the environment or an argument takes precedence."""
    _write_stack_state(tmp_path, mark=start_mark(os.getpid()))
    assert find_http_endpoint(None, None) == Endpoint('http://127.0.0.1:4568', 'tml-local')
    assert find_http_endpoint('http://localhost:4568', '').api_key == 'tml-local'
    assert find_http_endpoint('http://elsewhere:1', None) == Endpoint('http://elsewhere:1', '')
    monkeypatch.setenv('TWINKLE_API_KEY', 'tml-named')
    assert find_http_endpoint(None, None).api_key == 'tml-named'
    assert find_http_endpoint('http://elsewhere:1', 'tml-mine') == Endpoint('http://elsewhere:1', 'tml-mine')


def test_console_of_the_stack_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The console of a running stack is found by default, and by each of the stack's two addresses."""
    _write_stack_state(tmp_path, mark=start_mark(os.getpid()))
    own = Endpoint('http://127.0.0.1:4568', 'tml-local')
    assert find_console_endpoint('') == own
    assert find_console_endpoint('http://localhost:4568') == own
    monkeypatch.setenv('TWINKLE_SERVER_URL', 'grpc://127.0.0.1:4567')
    assert find_console_endpoint('') == own
    monkeypatch.setenv('TWINKLE_SERVER_URL', 'https://elsewhere:1')
    assert find_console_endpoint('', tmp_path) == own
    with pytest.raises(ValueError, match='TWINKLE_API_KEY'):
        find_console_endpoint('')
    monkeypatch.setenv('TWINKLE_API_KEY', 'tml-named')
    monkeypatch.setenv('TWINKLE_CA', 'ca.crt')
    assert find_console_endpoint('') == Endpoint('https://elsewhere:1', 'tml-named', 'ca.crt')
    assert find_console_endpoint('other:2') == Endpoint('other:2', 'tml-named', 'ca.crt')


def test_stack_without_http_has_no_console(tmp_path: Path) -> None:
    """The error for a stack without HTTP names the setting."""
    _write_stack_state(tmp_path, mark=start_mark(os.getpid()), http_address='')
    with pytest.raises(ValueError, match='http_listen'):
        find_console_endpoint('')


def test_http_address_is_missing_without_a_stack() -> None:
    """If no stack runs, the error for a missing address names the argument `base_url`."""
    with pytest.raises(ValueError, match='base_url'):
        find_http_endpoint(None, 'tml-mine')


def test_local_stack_with_tls_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stack's certificate authority overrides that of the environment, only for the stack's address."""
    _write_stack_state(tmp_path, mark=start_mark(os.getpid()), ca='/stack/ca.crt')
    monkeypatch.setenv('TWINKLE_CA', '/other/ca.crt')
    assert find_endpoint(None, None) == Endpoint('https://127.0.0.1:4567', 'tml-local', '/stack/ca.crt')
    assert find_endpoint('localhost:4567', None).address == 'https://127.0.0.1:4567'
    assert find_endpoint('https://elsewhere', 'k') == Endpoint('https://elsewhere', 'k', '/other/ca.crt')
    assert find_endpoint('https://elsewhere', 'k', '/mine.crt').ca == '/mine.crt'


def test_authority_for_an_address_without_tls_is_refused() -> None:
    """A certificate authority requires an address with `https://`."""
    with pytest.raises(ValueError, match='https://'):
        find_endpoint('host:2', 'tml-mine', '/mine.crt')


@pytest.mark.parametrize('content', [None, b'no certificate'])
def test_authority_that_cannot_be_used_is_refused(tmp_path: Path, content: bytes | None) -> None:
    """A missing or malformed certificate file is refused when the client is created."""
    if content is not None:
        (tmp_path / 'ca.crt').write_bytes(content)
    with pytest.raises(ValueError, match=r'ca: .*ca\.crt'):
        TwinkleClient('https://host:2', 'tml-mine', ca=tmp_path / 'ca.crt')


def test_stack_that_has_exited_is_not_found(tmp_path: Path) -> None:
    """A stack whose process id now belongs to another process is not found."""
    _write_stack_state(tmp_path, mark='0')
    with pytest.raises(ValueError, match='twinkle up'):
        find_endpoint(None, None)


def _write_stack_state(folder: Path, *, mark: str, ca: str = '', http_address: str = '127.0.0.1:4568') -> None:
    key_path(folder).write_text('tml-local\n')
    service = ServiceState(name='gateway', pid=os.getpid(), start_mark=mark, address='127.0.0.1:4567', log_path='')
    StackState.create(folder, base_model='tiny', services=(service,), http_address=http_address, ca=ca).save()
