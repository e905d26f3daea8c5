"""Hashes secrets with HMAC-SHA256 under a pepper that the database never sees.

A plain keyed hash is enough, and right for a check on every call (about 2 us), because secrets are
256 bits of chance: nobody searches that, as they would a password's few.
"""

import hashlib
import hmac
import os
import secrets
from pathlib import Path

_PEPPER_BYTES = 32
_MIN_PEPPER_BYTES = 16


class PepperedHasher:
    """Turns secrets into digests."""

    def __init__(self, pepper: bytes) -> None:
        """Use `pepper`, at least 16 secret bytes.

        Raises:
            ValueError: it is shorter.
        """
        if len(pepper) < _MIN_PEPPER_BYTES:
            raise ValueError(f'the pepper has {len(pepper)} bytes; give at least {_MIN_PEPPER_BYTES}')
        self._pepper = pepper

    def digest(self, secret: str) -> bytes:
        """Return 32 bytes that tell nothing of the secret to whoever lacks the pepper."""
        return hmac.digest(self._pepper, secret.encode(), hashlib.sha256)


def load_pepper(path: Path) -> bytes:
    """Return the pepper kept at `path`, made at the first call, readable by the owner alone.

    Concurrency: of several processes at their first call, all get the same pepper.

    Raises:
        OSError: the file cannot be read or made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        temporary = path.with_name(f'{path.name}.{os.getpid()}-{secrets.token_hex(4)}')
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(descriptor, 'wb') as file:
            file.write(secrets.token_bytes(_PEPPER_BYTES))
            file.flush()
            os.fsync(file.fileno())
        try:
            # A link, unlike a rename, never replaces the pepper of a process that was faster.
            os.link(temporary, path)
        except FileExistsError:
            pass
        finally:
            temporary.unlink()
    return path.read_bytes()
