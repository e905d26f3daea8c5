"""Wires exports to a database, and creates the runner that carries them out."""

from services.gateway.catalogue.grpc import GrpcCheckpoints
from services.gateway.config import GatewayConfig
from services.gateway.exports.exports import ExportNotifier, Exports
from services.gateway.exports.rules import ExportLimits
from services.gateway.exports.runner import ExportRunner, ExportTransfer
from services.gateway.exports.sql import SqlExportStore
from services.gateway.exports.transfers import CheckpointArchives, ExportTargets
from services.gateway.keys.open import pepper_of
from services.gateway.keys.pepper import PepperedSealer
from services.gateway.store.database import Database
from services.kit.clock import Clock


def open_exports(
    config: GatewayConfig, database: Database, checkpoints: GrpcCheckpoints, *, clock: Clock
) -> tuple[Exports, ExportRunner]:
    """Return the exports in `database` and their runner, whose `run` is a background job of the gateway."""
    options = config.exports
    store, notifier = SqlExportStore(database), ExportNotifier()
    targets = ExportTargets(root=options.folder, seconds=options.upload_time.total_seconds())
    sealer = PepperedSealer(pepper_of(config))
    archives = CheckpointArchives(checkpoints, root=config.state_dir / 'exports')
    limits = ExportLimits(
        at_once=options.at_once,
        attempts=options.attempts,
        lease=options.lease,
        poll=options.poll,
        keep_for=options.keep_for,
    )
    exports = Exports(store, checkpoints, targets, sealer=sealer, notifier=notifier, clock=clock)
    transfer = ExportTransfer(archives, targets, sealer)
    return exports, ExportRunner(store, transfer, notifier=notifier, limits=limits, clock=clock)
