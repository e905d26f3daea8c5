"""The verb that accepts an export: it answers at once, and `run_exports` carries it out."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from services.gateway.domain.catalogue import Checkpoint
from services.gateway.domain.export import Export, Target, parse_target
from services.gateway.ports.exports import Destination, ExportStore, Sealer
from services.kit.caller import Caller
from services.kit.clock import Clock
from services.kit.errors import InvalidField, RequestIdReused
from services.kit.ids import new_id

MOST_UNFINISHED = 16
"""Exports of one tenant that are not over."""

FindCheckpoint = Callable[[str], Awaitable[Checkpoint]]
"""Returns a checkpoint that the current caller may read, or raises."""


@dataclass(frozen=True, kw_only=True)
class ExportOrder:
    """What is asked for."""

    request_id: str
    checkpoint_path: str
    target: str
    hub_token: str
    is_private: bool


class StartExport:
    """Accepts exports."""

    def __init__(
        self, store: ExportStore, *, find: FindCheckpoint, destination: Destination, sealer: Sealer, clock: Clock
    ) -> None:
        """Keep exports in `store`.

        Args:
            store: keeps them.
            find: knows checkpoints.
            destination: takes them later.
            sealer: encrypts tokens.
            clock: tells the time.
        """
        self._store = store
        self._find = find
        self._destination = destination
        self._sealer = sealer
        self._clock = clock

    async def __call__(self, caller: Caller, order: ExportOrder) -> Export:
        """Return the export, accepted durably; the same request again is the same export.

        That is so whatever has become of the checkpoint meanwhile.

        Raises:
            InvalidField: the target is none, or a token is missing or given for nothing.
            NotSupportedHere: nothing can be sent there from here.
            CheckpointNotFound: the caller may read none of that path.
            RequestIdReused: the request id is that of another export.
            QuotaExceeded: too many are not over.
        """
        target = parse_target(order.target)
        _check_token(target, order.hub_token)
        kept = await self._store.find_request(caller.tenant_id, order.request_id)
        if kept is None:
            checkpoint = await self._find(order.checkpoint_path)
            self._destination.check(target)
            export = self._export(caller, order, checkpoint.digest)
            kept = await self._store.add_if_absent(export, most_unfinished=MOST_UNFINISHED)
        if not kept.is_of(order.checkpoint_path, order.target, is_private=order.is_private):
            raise RequestIdReused(order.request_id)
        return kept

    def _export(self, caller: Caller, order: ExportOrder, digest: str) -> Export:
        now, export_id = self._clock.now(), new_id('ex')
        return Export(
            export_id=export_id,
            tenant_id=caller.tenant_id,
            request_id=order.request_id,
            checkpoint_path=order.checkpoint_path,
            digest=digest,
            target=order.target,
            is_private=order.is_private,
            sealed_token=self._sealer.seal(order.hub_token, purpose=export_id),
            create_time=now,
            update_time=now,
            due_time=now,
        )


def _check_token(target: Target, token: str) -> None:
    if target.kind == 'file' and token:
        raise InvalidField('hub_token', 'must be empty: a folder asks for none')
    if target.kind != 'file' and not token:
        raise InvalidField('hub_token', 'is required: that of someone who may write to the hub')
    if not (token.isascii() and token.isprintable()):
        raise InvalidField('hub_token', 'must be of printable ASCII characters')
