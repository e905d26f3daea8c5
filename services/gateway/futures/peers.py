"""Puts together what several gateways on one database share futures by."""

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from services.gateway.config import GatewayConfig
from services.gateway.futures.follow_peers import FollowPeers
from services.gateway.futures.news import PayloadsNotShared
from services.gateway.futures.payload_files import PayloadFiles
from services.gateway.futures.peer_ports import Peers
from services.gateway.futures.persistence import Persistence
from services.gateway.futures.sql_peers import SqlPeers
from services.gateway.futures.verbs import FutureVerbs
from services.gateway.store.database import Database

_BEATS = 10
"""In a lease."""
_SILENT_BEATS = 3
"""After which one whose connection is gone has died."""


async def make_peers(config: GatewayConfig, database: Database, payloads: PayloadFiles) -> Peers | None:
    """Return the other gateways on the database; None where it can have but this one."""
    url = config.database_address()
    if not url.startswith('postgresql'):
        return None
    lease = config.futures.lease
    return SqlPeers(
        database,
        url,
        payload_store_id=await payloads.store_id(),
        silence=lease * _SILENT_BEATS / _BEATS,
        lease=lease,
    )


@asynccontextmanager
async def sharing(
    config: GatewayConfig, peers: Peers | None, verbs: FutureVerbs
) -> AsyncIterator[Callable[[], Coroutine[Any, Any, Any]]]:
    """Have a place among the gateways during the block, and yield the job that keeps it and carries on with futures.

    Raises:
        SystemExit: another gateway on the database keeps payloads elsewhere; the message names the setting.
    """
    if peers is None:
        yield verbs.resume
        return
    follow = FollowPeers(peers, verbs, Persistence(), beat=config.futures.lease / _BEATS)
    try:
        await follow.join()
    except PayloadsNotShared as error:
        text = (
            f'futures.payload_dir: another gateway on this database keeps payloads in another folder than '
            f'{config.payload_folder()}; give all of them the same one, such as a network mount'
        )
        raise SystemExit(f'{config.service}: {text}') from error
    try:
        yield follow.__call__
    finally:
        await verbs.close()
        await follow.leave()
