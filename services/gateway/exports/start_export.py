"""The verb that accepts an export: it answers at once, and `run_exports` carries it out."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from services.gateway.catalogue.rules import Checkpoint
from services.gateway.exports.export_world import ExportWorld
from services.gateway.exports.rules import Export, Target, parse_target
from services.kit.caller import Caller
from services.kit.errors import DomainError, InvalidField, RequestIdReused
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

    def __init__(self, world: ExportWorld, *, find: FindCheckpoint) -> None:
        """Accept them for `world`; `find` knows checkpoints."""
        self._world = world
        self._find = find

    async def __call__(self, caller: Caller, order: ExportOrder) -> Export:
        """Return the export, accepted durably; the same request again is the same export.

        That is so whatever has become of the checkpoint meanwhile. Another request for what is under way already, by
        the same token, is answered with the export that is under way.

        Raises:
            InvalidField: the target is none, or a token is missing or given for nothing.
            NotSupportedHere: nothing can be sent there from here.
            CheckpointNotFound: the caller may read none of that path.
            RequestIdReused: the request id is that of another export.
            QuotaExceeded: too many are not over.
        """
        target = parse_target(order.target)
        _check_token(target, order.hub_token)
        kept = await self._world.store.find_request(caller.tenant_id, order.request_id)
        if kept is None:
            checkpoint = await self._find(order.checkpoint_path)
            self._world.destination.check(target)
            kept = await self._add(self._export(caller, order, checkpoint.digest), order.hub_token)
        if not kept.is_of(order.checkpoint_path, order.target, is_private=order.is_private):
            raise RequestIdReused(order.request_id)
        return kept

    async def _add(self, export: Export, token: str) -> Export:
        def is_same(other: Export) -> bool:
            return other.is_push_of(export) and self._token_of(other) == token

        kept = await self._world.store.add_if_absent(export, is_same=is_same, most_unfinished=MOST_UNFINISHED)
        self._world.news.tell()
        return kept

    def _token_of(self, export: Export) -> str | None:
        """Return the token that an export goes by; None: it can no longer be read."""
        try:
            return self._world.sealer.open(export.sealed_token, purpose=export.export_id)
        except DomainError:
            return None

    def _export(self, caller: Caller, order: ExportOrder, digest: str) -> Export:
        now, export_id = self._world.clock.now(), new_id('ex')
        return Export(
            export_id=export_id,
            tenant_id=caller.tenant_id,
            request_id=order.request_id,
            checkpoint_path=order.checkpoint_path,
            digest=digest,
            target=order.target,
            is_private=order.is_private,
            sealed_token=self._world.sealer.seal(order.hub_token, purpose=export_id),
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
