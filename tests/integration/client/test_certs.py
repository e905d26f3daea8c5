"""`twinkle certs` and the certificates of a stack: creation, renewal and output."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from twinkle_client.cli import app
from twinkle_client.stack import SERVICES, ServiceState, StackOptions, StackState
from twinkle_client.stack.certificates import renewed_certificates, tls_settings
from twinkle_services.kit.certificates import make_certificates


def _certs(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ['certs', *words])
    return result.exit_code, ' '.join(result.output.split())


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_command_creates_missing_certificates_and_keeps_the_rest(tmp_path: Path) -> None:
    """A first run creates all certificates, a second run changes nothing, and `--force` keeps only the authority."""
    folder = tmp_path / 'certificates'
    code, output = _certs(str(folder), '--host', 'train.example', '--host', 'model=10.0.0.5')
    assert code == 0
    files = {f'{name}.{kind}' for name in ('ca', *SERVICES) for kind in ('crt', 'key')}
    before = _contents(folder)
    assert set(before) == files
    assert str(datetime.now(UTC).year + 10) in output
    assert 'train.example' in output
    assert _certs(str(folder))[0] == 0
    assert _contents(folder) == before
    assert _certs(str(folder), '--force')[0] == 0
    unchanged = {name for name, content in _contents(folder).items() if before[name] == content}
    assert unchanged == {'ca.crt', 'ca.key'}


def test_certificates_are_printed_as_json(tmp_path: Path) -> None:
    """The option `--json` prints the path, the expiry and the names of each certificate."""
    code, output = _certs(str(tmp_path), '--host', 'train.example', '--json')
    found = {Path(item['path']).name: item for item in json.loads(output)}
    assert (code, set(found)) == (0, {f'{name}.crt' for name in ('ca', *SERVICES)})
    assert 'train.example' in found['gateway.crt']['names']
    assert all(
        item['is_new'] and datetime.fromisoformat(item['expires']) > datetime.now(UTC) for item in found.values()
    )


def test_certificate_without_its_key_is_replaced(tmp_path: Path) -> None:
    """A service whose key was lost gets a new pair for the same hosts, and no other file changes."""
    assert _certs(str(tmp_path), '--host', 'model=10.0.0.5')[0] == 0
    before = _contents(tmp_path)
    (tmp_path / 'model.key').unlink()
    code, output = _certs(str(tmp_path))
    assert (code, '10.0.0.5' in output) == (0, True)
    after = _contents(tmp_path)
    assert {name for name in before if after[name] != before[name]} == {'model.crt', 'model.key'}


def test_command_refuses_new_hosts_and_unknown_services(tmp_path: Path) -> None:
    """A host that is missing from an existing certificate, or an unknown service, is refused, and no file changes."""
    assert _certs(str(tmp_path))[0] == 0
    before = _contents(tmp_path)
    code, output = _certs(str(tmp_path), '--host', 'new.example')
    assert (code, 'new.example' in output, '--force' in output) == (1, True, True)
    code, output = _certs(str(tmp_path), '--host', 'trainer=new.example')
    assert (code, "'trainer'" in output) == (1, True)
    assert _contents(tmp_path) == before


def test_stack_renews_certificates_before_they_expire(tmp_path: Path) -> None:
    """A start renews certificates that expire within a month, with the same authority."""
    creation_time = datetime.now(UTC) - timedelta(days=340)
    make_certificates(tmp_path, dict.fromkeys(SERVICES, ()), now=creation_time)
    before = _contents(tmp_path)
    assert renewed_certificates(tmp_path, '127.0.0.1:0') == tmp_path / 'ca.crt'
    renewed = _contents(tmp_path)
    assert renewed['ca.crt'] == before['ca.crt']
    assert renewed['gateway.crt'] != before['gateway.crt']
    renewed_certificates(tmp_path, '0.0.0.0:80')
    assert _contents(tmp_path) == renewed


@pytest.mark.parametrize('name', ['sampler', 'sampler-2'])
def test_every_process_of_a_service_uses_its_certificate(tmp_path: Path, name: str) -> None:
    """Every sampler process uses the sampler service's certificate, and verifies other services by their names."""
    section = tls_settings(tmp_path / 'ca.crt', name)
    assert section['certificate'] == str(tmp_path / 'sampler.crt')
    assert section['server_names'] == {service: service for service in SERVICES}


@pytest.mark.parametrize(('text', 'is_secure'), [('tls: true', True), ('tls: false', False), ('{}', False)])
def test_stack_file_enables_tls(tmp_path: Path, text: str, *, is_secure: bool) -> None:
    """The key `tls` of a stack file enables TLS, like the option `--tls`."""
    (tmp_path / 'stack.yaml').write_text(text)
    assert StackOptions(state_dir=tmp_path).with_file(tmp_path / 'stack.yaml').tls is is_secure


def test_tls_setting_must_be_a_boolean(tmp_path: Path) -> None:
    """A string such as "on" is refused as the value of `tls` in a stack file."""
    (tmp_path / 'stack.yaml').write_text('tls: "on"')
    with pytest.raises(ValueError, match='tls must be true or false'):
        StackOptions(state_dir=tmp_path).with_file(tmp_path / 'stack.yaml')


@pytest.mark.parametrize('listen', ['0.0.0.0:8000', '[::]:8000', '127.0.0.1:8000'])
def test_wildcard_address_is_replaced_by_loopback_with_tls(tmp_path: Path, listen: str) -> None:
    """TLS replaces a wildcard address by the loopback address, because no certificate is valid for a wildcard."""
    gateway = ServiceState(name='gateway', pid=1, start_mark='', address=listen, log_path='')
    fields = {'base_model': 'tiny', 'services': (gateway,), 'http_address': listen}
    secure = StackState.create(tmp_path, ca='ca.crt', **fields)
    assert (secure.url, secure.http_url) == ('https://127.0.0.1:8000', 'https://127.0.0.1:8000')
    plain = StackState.create(tmp_path, **fields)
    assert (plain.url, plain.http_url) == (listen, f'http://{listen}')
