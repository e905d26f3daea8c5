"""Rules of API keys: validity, secrets, and the pepper that hashes them."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from twinkle_services.gateway.config import GatewayConfig
from twinkle_services.gateway.credentials import MIN_SECRET_LENGTH, Scope
from twinkle_services.gateway.keys.pepper import PepperedHasher, PepperUnusable, load_pepper, pepper_of
from twinkle_services.gateway.keys.rules import ApiKey, new_secret

NOW = datetime(2026, 5, 1, tzinfo=UTC)
KEY = ApiKey(key_id='key-1', tenant_id='a', scopes=frozenset(Scope), display_name='', create_time=NOW)


def test_key_is_valid_until_it_expires_or_is_revoked() -> None:
    """A key is invalid from its expiry on, and always once it is revoked."""
    assert KEY.is_valid_at(NOW)
    expiring = replace(KEY, expire_time=NOW + timedelta(hours=1))
    assert expiring.is_valid_at(NOW + timedelta(minutes=59))
    assert not expiring.is_valid_at(NOW + timedelta(hours=1))
    assert not replace(KEY, revoke_time=NOW).is_valid_at(NOW)


def test_secret_contains_its_key_id_and_is_unique() -> None:
    """A secret starts with 'tml-' and the key's id, and no two secrets are equal."""
    secrets = {new_secret('key-1') for _ in range(100)}
    assert len(secrets) == 100
    assert all(secret.startswith('tml-key-1-') and len(secret) > MIN_SECRET_LENGTH for secret in secrets)


def test_digest_depends_on_secret_and_pepper() -> None:
    """A secret has one digest with one pepper, and a different digest with another pepper."""
    one, other = PepperedHasher(b'1' * 32), PepperedHasher(b'2' * 32)
    assert one.digest('tml-a') == one.digest('tml-a')
    assert len({one.digest('tml-a'), one.digest('tml-b'), other.digest('tml-a')}) == 3


def test_short_pepper_is_refused() -> None:
    """A pepper of less than 16 bytes raises ValueError."""
    with pytest.raises(ValueError, match='at least 16'):
        PepperedHasher(b'short')


def test_pepper_file_is_created_once_and_readable_by_its_owner_only(tmp_path: Path) -> None:
    """The second call returns the first call's pepper, and the file's mode is 0600."""
    path = tmp_path / 'state' / 'pepper'
    pepper = load_pepper(path)
    assert load_pepper(path) == pepper
    assert len(pepper) == 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert [item.name for item in path.parent.iterdir()] == ['pepper']


def test_configured_pepper_is_used_unchanged(tmp_path: Path) -> None:
    """A pepper in the configuration is used without writing a file."""
    config = GatewayConfig(state_dir=tmp_path, key_pepper='ab' * 16)
    assert pepper_of(config) == b'\xab' * 16
    assert list(tmp_path.iterdir()) == []


def test_each_state_folder_has_a_permanent_pepper(tmp_path: Path) -> None:
    """A state folder always gives the same pepper, and two folders give different peppers."""
    first = pepper_of(GatewayConfig(state_dir=tmp_path / 'a'))
    assert pepper_of(GatewayConfig(state_dir=tmp_path / 'a')) == first != pepper_of(GatewayConfig(state_dir=tmp_path))


def test_damaged_or_missing_pepper_is_refused(tmp_path: Path) -> None:
    """A damaged file, or a missing file that may not be created, is refused; a pepper without a checksum is read."""
    path = tmp_path / 'key_pepper'
    pepper = load_pepper(path)
    content = path.read_bytes()
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(PepperUnusable, match=str(path)):
            load_pepper(path)
    path.write_bytes(pepper)
    assert load_pepper(path) == pepper
    path.unlink()
    with pytest.raises(PepperUnusable, match='is missing'):
        load_pepper(path, is_creation_allowed=False)
    assert not path.exists()
