"""Fetch: send one state, from a byte on."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from services.checkpoint.application.frames import header_of
from services.checkpoint.domain import AdapterKey, Catalogue, Record, parse_checkpoint_path
from services.checkpoint.ports import StateStore
from services.kit.authority import require_internal
from services.kit.caller import Caller
from services.kit.clock import Clock
from services.kit.errors import CheckpointNotFound
from services.kit.weights import Encoding, Frame, Sender, Wanted


@dataclass(frozen=True)
class VersionRef:
    """A version of an adapter; 0 is the newest."""

    adapter_id: str
    version: int


@dataclass(frozen=True)
class CheckpointRef:
    """A checkpoint by its path or id."""

    path: str


@dataclass(frozen=True)
class Wish:
    """What is to be sent, and how."""

    reference: VersionRef | CheckpointRef
    is_adapter_only: bool = False
    """Leave out what only a trainer needs."""
    offset: int = 0
    """First byte to send."""
    host_id: str = ''
    """Of the memory the caller sees, where it takes a segment instead of bytes. Empty: it does not."""

    @property
    def wanted(self) -> Wanted:
        """Return what the caller can take."""
        shared = frozenset({Encoding.SHARED_MEMORY}) if self.host_id else frozenset[Encoding]()
        return Wanted(shared, self.host_id, resume_offset=self.offset)


class Fetch:
    """Sends a version or a checkpoint to a service."""

    def __init__(self, catalogue: Catalogue, store: StateStore, clock: Clock, *, sender: Sender) -> None:
        """Use the catalogue's records and the store's bytes."""
        self._catalogue = catalogue
        self._store = store
        self._clock = clock
        self._sender = sender

    async def __call__(self, caller: Caller, wish: Wish) -> AsyncGenerator[Frame, None]:
        """Yield the frames.

        Raises:
            ScopeMissing: the caller is no service.
            AdapterNotFound, VersionNotFound, CheckpointNotFound: it is not here.
            InvalidField: the offset lies behind the state.
        """
        require_internal(caller)
        record = self._find(caller, wish.reference)
        source = await self._store.open_state(record.key, is_adapter_only=wish.is_adapter_only)
        header = header_of(record, source.manifest)
        async with aclosing(self._sender.frames(header, source, wanted=wish.wanted, offset_field='offset')) as frames:
            async for frame in frames:
                yield frame

    def _find(self, caller: Caller, reference: VersionRef | CheckpointRef) -> Record:
        if isinstance(reference, VersionRef):
            return self._catalogue.ring(AdapterKey(caller.tenant_id, reference.adapter_id)).get(reference.version)
        key = parse_checkpoint_path(caller.tenant_id, reference.path)
        if key is None:
            raise CheckpointNotFound(reference.path)
        return self._catalogue.readable_checkpoint(key, now=self._clock.now())
