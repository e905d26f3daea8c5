"""Payloads of operations, by the digest of their content: the same batch sent a thousand times is one file."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from threading import Lock

from blake3 import blake3

from services.kit.failpoints import reach
from services.model.backends.journal.files import Folder


class PayloadDamaged(Exception):
    """A payload is missing, or its bytes are not those that were written."""


class Payloads:
    """Files named by their digest. Safe for several threads.

    A digest is pinned from `put` until `unpin`, so that one that is being written again is not dropped
    because nothing else needs it.
    """

    def __init__(self, path: Path, *, sync: Callable[[int], None]) -> None:
        """Keep files in the folder at `path`."""
        self._folder = Folder(path, sync=sync)
        self._pins: Counter[str] = Counter()
        self._lock = Lock()

    def put(self, payload: bytes) -> str:
        """Keep a payload, durably, and return its digest, pinned.

        Raises:
            OSError: the disk refused it; it is not pinned.
        """
        digest = blake3(payload).hexdigest()
        with self._lock:
            self._pins[digest] += 1
        try:
            if not self._is_here(digest, payload):
                self._folder.write(digest, [payload])
        except BaseException:
            self.unpin(digest)
            raise
        reach('journal.payload.written')
        return digest

    def get(self, digest: str) -> bytes:
        """Return a payload.

        Raises:
            PayloadDamaged: it is not what was put.
        """
        try:
            payload = self._folder.read(digest)
        except FileNotFoundError as error:
            raise PayloadDamaged(f'payload {digest} is missing') from error
        if blake3(payload).hexdigest() != digest:
            raise PayloadDamaged(f'payload {digest} has other bytes than were written')
        return payload

    def unpin(self, digest: str) -> None:
        """Say that the digest is on record by now, or will not be."""
        with self._lock:
            self._pins[digest] -= 1
            if not self._pins[digest]:
                del self._pins[digest]

    def drop(self, digest: str) -> None:
        """Take away a payload that nothing on record needs, unless it is being put again."""
        with self._lock:
            if digest not in self._pins:
                self._folder.drop(digest)

    def sweep(self, wanted: set[str]) -> int:
        """Take away what nothing on record needs; only before anything is put."""
        return self._folder.sweep(wanted)

    def _is_here(self, digest: str, payload: bytes) -> bool:
        # Compared, not believed: a damaged file of that name would otherwise stay for good.
        try:
            return self._folder.read(digest) == payload
        except FileNotFoundError:
            return False
