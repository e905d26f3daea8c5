"""Encrypts secrets that have to lie in the database for a while."""

import hashlib
import hmac
import secrets

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from services.kit.errors import CredentialsInvalid

_NONCE_BYTES = 12


class PepperedSealer:
    """Implements `ports.Sealer` with AES-256-GCM. Gateways with one pepper open each other's."""

    def __init__(self, pepper: bytes) -> None:
        """Use a key made of `pepper`, which the database never sees."""
        self._cipher = AESGCM(hmac.digest(pepper, b'key of sealed secrets', hashlib.sha256))

    def seal(self, secret: str, *, purpose: str) -> bytes:
        """Return a secret encrypted; empty for an empty one."""
        if not secret:
            return b''
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, secret.encode(), purpose.encode())

    def open(self, sealed: bytes, *, purpose: str) -> str:
        """Return what was sealed; see the port."""
        if not sealed:
            return ''
        try:
            return self._cipher.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], purpose.encode()).decode()
        except InvalidTag as error:
            raise CredentialsInvalid() from error
