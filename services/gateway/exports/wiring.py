"""Puts exports together: where they are kept, where they go, and who carries them out."""

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from services.gateway.catalogue.grpc import GrpcCheckpoints
from services.gateway.config import GatewayConfig
from services.gateway.exports.archives import CheckpointArchives
from services.gateway.exports.cancel_export import CancelExport
from services.gateway.exports.export_news import ExportNews
from services.gateway.exports.export_world import ExportWorld
from services.gateway.exports.get_export import GetExport
from services.gateway.exports.list_exports import ListExports
from services.gateway.exports.run_exports import ExportLimits, RunExports
from services.gateway.exports.sealer import PepperedSealer
from services.gateway.exports.servicer import ExportServicer
from services.gateway.exports.sql import SqlExportStore
from services.gateway.exports.start_export import StartExport
from services.gateway.exports.targets import ExportTargets
from services.gateway.keys.open import pepper_of
from services.gateway.store.database import Database
from services.kit.clock import Clock
from services.kit.rpc.context import acting_for


@dataclass(frozen=True)
class OpenExports:
    """Exports, and what is to be done beside serving them."""

    servicer: ExportServicer
    jobs: tuple[Callable[[], Coroutine[Any, Any, Any]], ...]


def make_exports(
    config: GatewayConfig, database: Database, channels: Mapping[str, grpc.aio.Channel], *, clock: Clock
) -> OpenExports:
    """Return them; `channels` are bare ones to the services behind the gateway, by service."""
    options = config.exports
    store = SqlExportStore(database)
    keeper = GrpcCheckpoints(channels.get('checkpoint'), internal_token=config.internal_token)
    targets = ExportTargets(root=options.folder, seconds=options.upload_time.total_seconds())
    sealer = PepperedSealer(pepper_of(config))
    news = ExportNews()
    world = ExportWorld(
        store=store,
        archives=CheckpointArchives(keeper, root=config.state_dir / 'exports'),
        destination=targets,
        sealer=sealer,
        news=news,
        acting_for=acting_for,
        clock=clock,
    )
    limits = ExportLimits(
        at_once=options.at_once,
        attempts=options.attempts,
        lease=options.lease,
        poll=options.poll,
        keep_for=options.keep_for,
    )
    servicer = ExportServicer(
        start=StartExport(world, find=keeper.get),
        get=GetExport(store),
        list_exports=ListExports(store),
        cancel=CancelExport(store, news=news, clock=clock),
    )
    return OpenExports(servicer, (RunExports(world, limits).keep_on,))
