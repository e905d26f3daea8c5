"""Hashes and encrypts secrets with a pepper that is not stored in the database.

Generated secrets have 256 random bits. HMAC-SHA256 (about 2 us) is therefore safe, and fast enough to run on every
call; slow password hashes are not needed.
"""

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from twinkle_services.gateway.config import GatewayConfig
from twinkle_services.kit.errors import CredentialsInvalid

_PEPPER_BYTES = 32
_MIN_PEPPER_BYTES = 16
_NONCE_BYTES = 12
_CHECKSUM_BYTES = 8


class PepperUnusable(Exception):
    """The stored pepper is missing or damaged; the message states the remedy."""


class PepperedHasher:
    """Computes digests of secrets. A secret cannot be verified without the pepper.

    Raises:
        ValueError: the pepper is shorter than 16 bytes.
    """

    def __init__(self, pepper: bytes) -> None:
        if len(pepper) < _MIN_PEPPER_BYTES:
            raise ValueError(f'the pepper has {len(pepper)} bytes; give at least {_MIN_PEPPER_BYTES}')
        self._pepper = pepper

    def digest(self, secret: str) -> bytes:
        """Return the digest of a secret, 32 bytes."""
        return hmac.digest(self._pepper, secret.encode(), hashlib.sha256)


class PepperedSealer:
    """Encrypts secrets for storage with AES-256-GCM; gateways with the same pepper can decrypt them."""

    def __init__(self, pepper: bytes) -> None:
        self._cipher = AESGCM(hmac.digest(pepper, b'key of sealed secrets', hashlib.sha256))

    def seal(self, secret: str, *, purpose: str) -> bytes:
        """Return the encrypted secret, which `open` decrypts only for the same purpose; empty for an empty secret."""
        if not secret:
            return b''
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, secret.encode(), purpose.encode())

    def open(self, sealed: bytes, *, purpose: str) -> str:
        """Return the decrypted secret; empty if `sealed` is empty.

        Raises:
            CredentialsInvalid: the bytes are damaged, or were sealed with a different pepper or purpose.
        """
        if not sealed:
            return ''
        try:
            return self._cipher.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], purpose.encode()).decode()
        except (InvalidTag, ValueError) as error:
            # Bytes that are shorter than a nonce raise ValueError.
            raise CredentialsInvalid() from error


def load_pepper(path: Path, *, is_creation_allowed: bool = True) -> bytes:
    """Return the pepper stored at `path`; a missing file is created, and only its owner can read it.

    The file has a checksum, because a changed pepper would invalidate every key without an error. Files of earlier
    releases have no checksum and are accepted.

    Concurrency: processes that create the pepper at the same time all get the same pepper.

    Raises:
        PepperUnusable: the file is damaged, or it is missing and may not be created.
        OSError: the file cannot be read or created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        if not is_creation_allowed:
            raise PepperUnusable(
                f'{path} is missing, but the database has API keys, which are valid only with this file. Restore it, '
                'or set key_pepper to the pepper of another gateway on this database'
            )
        _create(path)
    content = path.read_bytes()
    pepper = content[:_PEPPER_BYTES]
    if content not in (pepper, pepper + _checksum_of(pepper)) or len(pepper) < _PEPPER_BYTES:
        raise PepperUnusable(f'{path} is damaged, so no API key could be verified; restore the file from a backup')
    return pepper


def pepper_of(config: GatewayConfig, *, is_creation_allowed: bool = True) -> bytes:
    """Return the configured pepper, or the one in the state folder; see `load_pepper`."""
    stored = config.pepper_file()
    return bytes.fromhex(config.key_pepper) or load_pepper(stored, is_creation_allowed=is_creation_allowed)


def _create(path: Path) -> None:
    temporary = path.with_name(f'{path.name}.{os.getpid()}-{secrets.token_hex(4)}')
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(descriptor, 'wb') as file:
        pepper = secrets.token_bytes(_PEPPER_BYTES)
        file.write(pepper + _checksum_of(pepper))
        file.flush()
        os.fsync(file.fileno())
    try:
        # Unlike a rename, a link never replaces the pepper that another process created first.
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        temporary.unlink()


def _checksum_of(pepper: bytes) -> bytes:
    return hashlib.blake2s(pepper, digest_size=_CHECKSUM_BYTES, person=b'checksum').digest()
