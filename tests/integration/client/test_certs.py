"""`twinkle certs` and the certificates of a stack: made, kept, renewed, shown."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.kit.certificates import make_certificates
from twinkle_client.cli import app
from twinkle_client.stack import SERVICES, ServiceState, StackOptions, StackState
from twinkle_client.stack.certificates import renewed_certificates, tls_settings


def _certs(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ['certs', *words])
    return result.exit_code, ' '.join(result.output.split())


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_command_makes_what_is_missing_and_keeps_the_rest(tmp_path: Path) -> None:
    """An authority and a pair for each service, shown with their ends; a second run changes nothing."""
    folder = tmp_path / 'certificates'
    code, told = _certs(str(folder), '--host', 'train.example', '--host', 'model=10.0.0.5')
    assert code == 0
    files = {f'{name}.{kind}' for name in ('ca', *SERVICES) for kind in ('crt', 'key')}
    before = _contents(folder)
    assert set(before) == files
    assert str(datetime.now(UTC).year + 10) in told
    assert 'train.example' in told
    assert _certs(str(folder))[0] == 0
    assert _contents(folder) == before
    assert _certs(str(folder), '--force')[0] == 0
    kept = {name for name, content in _contents(folder).items() if before[name] == content}
    assert kept == {'ca.crt', 'ca.key'}


def test_command_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    """A kept certificate that lacks a host, and a service that there is not: no traceback, and nothing changes."""
    assert _certs(str(tmp_path))[0] == 0
    before = _contents(tmp_path)
    code, told = _certs(str(tmp_path), '--host', 'new.example')
    assert (code, 'new.example' in told, '--force' in told) == (1, True, True)
    code, told = _certs(str(tmp_path), '--host', 'trainer=new.example')
    assert (code, "'trainer'" in told) == (1, True)
    assert _contents(tmp_path) == before


def test_stack_renews_certificates_before_they_end(tmp_path: Path) -> None:
    """At a start within a month of it, by the authority that clients know."""
    soon = datetime.now(UTC) - timedelta(days=340)
    make_certificates(tmp_path, dict.fromkeys(SERVICES, ()), now=soon)
    before = _contents(tmp_path)
    assert renewed_certificates(tmp_path, '127.0.0.1:0') == tmp_path / 'ca.crt'
    renewed = _contents(tmp_path)
    assert renewed['ca.crt'] == before['ca.crt']
    assert renewed['gateway.crt'] != before['gateway.crt']
    renewed_certificates(tmp_path, '0.0.0.0:80')
    assert _contents(tmp_path) == renewed


@pytest.mark.parametrize('name', ['sampler', 'sampler-2'])
def test_every_process_of_a_service_has_its_certificate(tmp_path: Path, name: str) -> None:
    """One more sampler is a sampler, and believes others by their own names."""
    section = tls_settings(tmp_path / 'ca.crt', name)
    assert section['certificate'] == str(tmp_path / 'sampler.crt')
    assert section['server_names'] == {service: service for service in SERVICES}


@pytest.mark.parametrize(('text', 'is_secure'), [('tls: true', True), ('tls: false', False), ('{}', False)])
def test_file_says_whether_a_stack_speaks_tls(tmp_path: Path, text: str, *, is_secure: bool) -> None:
    """Beside `--tls`."""
    (tmp_path / 'stack.yaml').write_text(text)
    assert StackOptions(state_dir=tmp_path).with_file(tmp_path / 'stack.yaml').tls is is_secure


def test_file_that_says_something_else_is_refused(tmp_path: Path) -> None:
    """A word that looks like yes is no answer."""
    (tmp_path / 'stack.yaml').write_text('tls: "on"')
    with pytest.raises(ValueError, match='tls must be true or false'):
        StackOptions(state_dir=tmp_path).with_file(tmp_path / 'stack.yaml')


@pytest.mark.parametrize('listen', ['0.0.0.0:8000', '[::]:8000', '127.0.0.1:8000'])
def test_stack_is_called_by_a_name_of_its_certificate(tmp_path: Path, listen: str) -> None:
    """What listens everywhere is no host that a certificate is for."""
    gateway = ServiceState(name='gateway', pid=1, start_mark='', address=listen, log_path='')
    fields = {'base_model': 'tiny', 'services': (gateway,), 'http_address': listen}
    secure = StackState.create(tmp_path, ca='ca.crt', **fields)
    assert (secure.url, secure.http_url) == ('https://127.0.0.1:8000', 'https://127.0.0.1:8000')
    plain = StackState.create(tmp_path, **fields)
    assert (plain.url, plain.http_url) == (listen, f'http://{listen}')
