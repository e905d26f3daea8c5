"""Certificate files: validation at startup, renewal, and creation for development."""

import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from fixtures.certificates import long_ago, make_authority, tls_of
from twinkle_services.checkpoint.config import CheckpointConfig
from twinkle_services.data.config import DataConfig
from twinkle_services.gateway.config import GatewayConfig
from twinkle_services.kit.certificates import make_certificates
from twinkle_services.kit.config import ServiceConfig, load_config
from twinkle_services.kit.tls import TlsConfig, TlsFiles, load_material, shared_files
from twinkle_services.model.config import ModelConfig
from twinkle_services.sampler.config import SamplerConfig


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of valid certificates."""
    return make_authority(tmp_path_factory.mktemp('tls'))


@pytest.fixture(scope='module')
def expired(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of certificates that expired long ago."""
    return make_authority(tmp_path_factory.mktemp('expired'), now=long_ago())


def _refusal(capsys: pytest.CaptureFixture[str], *settings: str, config_class: type[ServiceConfig] = DataConfig) -> str:
    """Return the error output of a service that refuses to start."""
    with pytest.raises(SystemExit) as caught:
        load_config(config_class, [part for setting in settings for part in ('--set', setting)])
    assert caught.value.code == 2
    return capsys.readouterr().err


def _settings(folder: Path, service: str = 'data', **other: Path | str) -> list[str]:
    values = {'certificate': folder / f'{service}.crt', 'key': folder / f'{service}.key', 'ca': folder / 'ca.crt'}
    return [f'tls.{name}={value}' for name, value in {**values, **other}.items()]


def test_created_certificates_are_accepted(folder: Path) -> None:
    """Certificates that `twinkle certs` creates are accepted, and the callers of the service are trusted."""
    config = load_config(DataConfig, [part for item in _settings(folder) for part in ('--set', item)])
    assert config.peers() == {'twinkle://gateway', 'twinkle://model'}
    assert load_material(config.tls).expire_time is not None


@pytest.mark.parametrize(
    ('change', 'field', 'advice'),
    [
        ({'certificate': 'missing.crt'}, 'tls.certificate', 'twinkle certs'),
        ({'key': 'missing.key'}, 'tls.key', 'twinkle certs'),
        ({'ca': 'missing.crt'}, 'tls.ca', 'twinkle certs'),
        ({'key': 'model.key'}, 'tls.key', 'one pair'),
        ({'certificate': 'data.key'}, 'tls.certificate', 'PEM'),
        ({'key': 'data.crt'}, 'tls.key', 'PEM'),
        ({'key': 'encrypted.key'}, 'tls.key', 'passphrase'),
        ({'ca': 'data.key'}, 'tls.ca', 'PEM'),
    ],
)
def test_unusable_file_is_refused_at_startup(
    folder: Path, change: dict[str, str], field: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unusable file prevents the start with a message that names the setting and the fix."""
    key = load_pem_private_key((folder / 'data.key').read_bytes(), password=None)
    encrypted = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b'secret'))
    (folder / 'encrypted.key').write_bytes(encrypted)
    error = _refusal(capsys, *_settings(folder, **{name: folder / file for name, file in change.items()}))
    assert f'{field}:' in error
    assert advice in error


def test_certificates_outside_their_validity_are_refused(
    folder: Path, expired: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Expired and not yet valid certificates are refused, and so is an expired authority."""
    expired_pair = {'certificate': expired / 'data.crt', 'key': expired / 'data.key'}
    assert 'tls.certificate' in (error := _refusal(capsys, *_settings(folder, **expired_pair)))
    assert 'expired' in error
    assert 'tls.ca' in _refusal(capsys, *_settings(folder, ca=expired / 'ca.crt'))
    with pytest.raises(ValueError, match='clock'):
        load_material(tls_of(folder, 'data'), now=long_ago())


@pytest.mark.parametrize('missing', ['certificate', 'key'])
def test_certificate_and_key_require_each_other(folder: Path, missing: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A certificate without its key is refused, and so is a key without its certificate."""
    settings = [item for item in _settings(folder) if not item.startswith(f'tls.{missing}')]
    assert f'{missing} is missing' in _refusal(capsys, *settings)


@pytest.mark.parametrize('service', [DataConfig, GatewayConfig])
@pytest.mark.parametrize('missing', ['ca', 'certificate'])
def test_trusted_peers_require_tls_and_an_authority(
    folder: Path, missing: str, service: type[ServiceConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    """Trusted peers can be configured only together with TLS and an authority that signs their certificates."""
    settings = [item for item in _settings(folder) if item.startswith('tls.ca') == (missing != 'ca')]
    assert f'tls.{missing}' in _refusal(
        capsys, *settings, 'tls.trusted_peers=["twinkle://gateway"]', config_class=service
    )


@pytest.mark.parametrize(
    ('config', 'callers'),
    [
        (CheckpointConfig, {'gateway', 'model', 'sampler'}),
        (DataConfig, {'gateway', 'model'}),
        (GatewayConfig, {'sampler'}),
        (ModelConfig, {'gateway'}),
        (SamplerConfig, {'gateway', 'sampler'}),
    ],
)
def test_service_trusts_its_callers_in_the_architecture(config: type[ServiceConfig], callers: set[str]) -> None:
    """Each service trusts the callers that the architecture describes."""
    assert set(config.callers) == callers


def test_gateway_alone_needs_no_authority(folder: Path) -> None:
    """A gateway may serve TLS without client certificates, because clients have keys."""
    config = GatewayConfig(tls=tls_of(folder, 'gateway', ca=None))
    assert config.peers() == set()
    assert not config.listeners()[0].is_mutual


def test_public_certificate_is_shown_to_clients_only(folder: Path) -> None:
    """The gateway can present different certificates to clients and to services."""
    public = {'certificate': folder / 'data.crt', 'key': folder / 'data.key'}
    config = GatewayConfig.model_validate(
        {'tls': tls_of(folder, 'gateway'), 'public_tls': public, 'internal_listen': '127.0.0.1:0'}
    )
    clients, services = config.listeners()
    assert (clients.tls.certificate, clients.is_mutual) == (folder / 'data.crt', False)
    assert (services.tls.certificate, services.is_mutual) == (folder / 'gateway.crt', True)


def test_renewed_files_are_read_again(tmp_path: Path) -> None:
    """A complete new pair is used at once, and an incomplete or missing pair is ignored."""
    make_authority(tmp_path, services=('data', 'other'))
    files = TlsFiles(tls_of(tmp_path, 'data'))
    first = files.current()
    assert files.current() is first
    key = (tmp_path / 'other.key').read_bytes()
    (tmp_path / 'data.key').write_bytes(key)
    assert files.current() is first
    (tmp_path / 'data.crt').unlink()
    assert files.current() is first
    (tmp_path / 'data.crt').write_bytes((tmp_path / 'other.crt').read_bytes())
    assert files.current().key == key


def test_renewal_that_failed_is_tried_again(tmp_path: Path) -> None:
    """Unusable files are read again after some time, even if they did not change."""
    make_authority(tmp_path, services=('data',))
    now = 0.0
    files = TlsFiles(tls_of(tmp_path, 'data'), clock=lambda: now)
    first, key = files.current(), tmp_path / 'data.key'
    good = key.read_bytes()
    make_certificates(tmp_path, {'data': ()}, is_forced=True)
    renewed = key.read_bytes()
    key.write_bytes(b'x' * len(renewed))
    assert files.current() is first
    previous = key.stat()
    key.write_bytes(renewed)
    os.utime(key, ns=(previous.st_atime_ns, previous.st_mtime_ns))
    assert files.current() is first
    now = 11.0
    assert files.current().key == renewed != good


def test_files_rewritten_with_equal_bytes_keep_the_object(tmp_path: Path) -> None:
    """Rewriting files with equal bytes does not make their users reconnect."""
    make_authority(tmp_path, services=('data',))
    files = TlsFiles(tls_of(tmp_path, 'data'))
    first, certificate = files.current(), tmp_path / 'data.crt'
    copy = tmp_path / 'copy.crt'
    copy.write_bytes(certificate.read_bytes())
    copy.replace(certificate)
    assert files.current() is first


def test_new_users_during_a_renewal_get_the_previous_files(tmp_path: Path) -> None:
    """All users of the same files in a process share their last valid contents, including users that start later."""
    make_authority(tmp_path, services=('data',))
    first = shared_files(tls_of(tmp_path, 'data')).current()
    (tmp_path / 'data.key').write_text('incomplete')
    assert shared_files(tls_of(tmp_path, 'data', trusted_peers=())).current() is first
    with pytest.raises(ValueError, match=r'tls\.key'):
        shared_files(tls_of(tmp_path, 'data', ca=None))


def test_only_the_owner_can_read_created_files(tmp_path: Path) -> None:
    """Other users can read neither the created keys nor their folder."""
    make_authority(tmp_path / 'new')
    assert [path for path in (tmp_path / 'new').iterdir() if path.stat().st_mode & 0o077] == []
    assert (tmp_path / 'new').stat().st_mode & 0o077 == 0


def test_existing_certificates_are_kept_unless_forced(tmp_path: Path) -> None:
    """A second run changes nothing, and a forced run replaces the certificates of services but not the authority."""
    first = make_certificates(tmp_path, {'data': ()})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    again = make_certificates(tmp_path, {'data': ()})
    assert ([item.is_new for item in first], [item.is_new for item in again]) == ([True, True], [False, False])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    forced = make_certificates(tmp_path, {'data': ()}, is_forced=True)
    assert [item.is_new for item in forced] == [False, True]
    changed = {path.name for path in tmp_path.iterdir() if path.read_bytes() != before[path.name]}
    assert changed == {'data.crt', 'data.key'}


def test_missing_host_of_an_existing_certificate_is_reported(tmp_path: Path) -> None:
    """A certificate that lacks a requested host is an error, and a forced run adds the host."""
    make_certificates(tmp_path, {'data': ()})
    with pytest.raises(ValueError, match='--force'):
        make_certificates(tmp_path, {'data': ('data.example', '10.0.0.7')})
    made = make_certificates(tmp_path, {'data': ('data.example', '10.0.0.7')}, is_forced=True)[1]
    assert {'data.example', '10.0.0.7', 'twinkle://data', 'data', 'localhost'} <= set(made.names)
    assert set(make_certificates(tmp_path, {'data': ()}, is_forced=True)[1].names) == set(made.names)


def test_authority_that_cannot_sign_is_reported(tmp_path: Path) -> None:
    """A missing authority key and an expired authority are errors."""
    make_certificates(tmp_path / 'valid', {'data': ()})
    (tmp_path / 'valid' / 'ca.key').unlink()
    assert len(make_certificates(tmp_path / 'valid', {'data': ()})) == 2
    with pytest.raises(ValueError, match=r'ca\.key'):
        make_certificates(tmp_path / 'valid', {'data': (), 'model': ()})
    make_certificates(tmp_path / 'expired', {'data': ()}, now=long_ago())
    with pytest.raises(ValueError, match='expired'):
        make_certificates(tmp_path / 'expired', {'data': ()})


def test_no_tls_is_the_default() -> None:
    """A default configuration neither uses nor requires certificates."""
    config = DataConfig()
    assert (config.tls, config.peers(), config.listeners()[0].is_mutual) == (TlsConfig(), set(), False)
