"""Keys: when they are good, and how their secrets look."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from services.gateway.keys.api_key import MIN_SECRET_LENGTH, ApiKey, every_scope, new_secret
from services.gateway.keys.hasher import PepperedHasher, load_pepper

NOW = datetime(2026, 5, 1, tzinfo=UTC)
KEY = ApiKey(key_id='key-1', tenant_id='a', scopes=every_scope(), display_name='', create_time=NOW)


def test_key_is_good_until_it_expires_or_is_revoked() -> None:
    """The moment of expiry is already too late; a revoked key is never good."""
    assert KEY.is_valid_at(NOW)
    expiring = replace(KEY, expire_time=NOW + timedelta(hours=1))
    assert expiring.is_valid_at(NOW + timedelta(minutes=59))
    assert not expiring.is_valid_at(NOW + timedelta(hours=1))
    assert not replace(KEY, revoke_time=NOW).is_valid_at(NOW)


def test_secret_shows_its_key_and_nothing_twice() -> None:
    """A secret begins with 'tml-' and the key's id, and two are never equal."""
    secrets = {new_secret('key-1') for _ in range(100)}
    assert len(secrets) == 100
    assert all(secret.startswith('tml-key-1-') and len(secret) > MIN_SECRET_LENGTH for secret in secrets)


def test_digest_depends_on_secret_and_pepper() -> None:
    """The same secret has the same digest under one pepper and another under another."""
    one, other = PepperedHasher(b'1' * 32), PepperedHasher(b'2' * 32)
    assert one.digest('tml-a') == one.digest('tml-a')
    assert len({one.digest('tml-a'), one.digest('tml-b'), other.digest('tml-a')}) == 3


def test_short_pepper_is_refused() -> None:
    """A pepper that could be guessed is no pepper."""
    with pytest.raises(ValueError, match='at least 16'):
        PepperedHasher(b'short')


def test_pepper_is_made_once_and_readable_by_its_owner_alone(tmp_path: Path) -> None:
    """The second call returns the first one's pepper; the file's mode is 0600."""
    path = tmp_path / 'state' / 'pepper'
    pepper = load_pepper(path)
    assert load_pepper(path) == pepper
    assert len(pepper) == 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert [item.name for item in path.parent.iterdir()] == ['pepper']
