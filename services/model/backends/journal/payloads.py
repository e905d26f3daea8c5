"""Stores payloads of operations as files named by their digest, so that a repeated batch is stored only once."""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Lock

from blake3 import blake3

from twinkle_services.kit.failpoints import reach
from twinkle_services.model.backends.journal.files import Folder


class PayloadDamaged(Exception):
    """A payload is missing, or its content does not match its digest."""


class Payloads:
    """Files named by their digest. Concurrency: thread-safe.

    A digest is pinned from `put` or `adopt` until `unpin`, so that its payload is not deleted before its row is
    committed.
    """

    def __init__(self, path: Path, *, sync: Callable[[int], None]) -> None:
        self._folder = Folder(path, sync=sync)
        self._pins: Counter[str] = Counter()
        self._lock = Lock()

    def put(self, payload: bytes) -> str:
        """Store a payload durably, and return its digest, which is pinned.

        Raises:
            OSError: Writing failed; the digest is not pinned.
        """
        digest = blake3(payload).hexdigest()
        with self._lock:
            self._pins[digest] += 1
        try:
            if not self._is_stored(digest, payload):
                self._folder.write(digest, [payload])
        except BaseException:
            self.unpin(digest)
            raise
        reach('journal.payload.written')
        return digest

    def adopt(self, source: Path) -> None:
        """Add a payload of another journal durably, and pin it. A missing file is ignored here; a restore reports it.

        Raises:
            OSError: Writing failed; the payload is not pinned.
        """
        with self._lock:
            self._pins[source.name] += 1
        try:
            with suppress(FileNotFoundError):
                self._folder.adopt(source)
        except BaseException:
            self.unpin(source.name)
            raise

    def get(self, digest: str) -> bytes:
        """Return a payload.

        Raises:
            PayloadDamaged: The file is missing or damaged.
            OSError: The disk failed.
        """
        try:
            payload = self._folder.read(digest)
        except FileNotFoundError as error:
            raise PayloadDamaged(f'payload {digest} is missing') from error
        if blake3(payload).hexdigest() != digest:
            raise PayloadDamaged(f'payload {digest} is damaged: its digest does not match')
        return payload

    def unpin(self, digest: str) -> None:
        """Unpin a digest once its row is committed or abandoned."""
        with self._lock:
            self._pins[digest] -= 1
            if not self._pins[digest]:
                del self._pins[digest]

    def drop(self, digest: str) -> None:
        """Delete a payload to which no row refers, unless it is being stored again."""
        with self._lock:
            if digest not in self._pins:
                self._folder.drop(digest)

    def sweep(self, used_digests: set[str]) -> int:
        """Delete all payloads that are not in `used_digests`; call this before the first `put`."""
        return self._folder.sweep(used_digests)

    def _is_stored(self, digest: str, payload: bytes) -> bool:
        # Compare the content: a damaged file would otherwise never be replaced.
        try:
            return self._folder.read(digest) == payload
        except FileNotFoundError:
            return False
