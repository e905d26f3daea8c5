"""What the verbs of exports share: where exports are kept, what they are made of, and where they go."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from services.gateway.exports.export_news import ExportNews
from services.gateway.exports.ports import ArchiveSource, Destination, ExportStore, Sealer
from services.kit.caller import Caller
from services.kit.clock import Clock


@dataclass(frozen=True, kw_only=True)
class ExportWorld:
    """What exports are accepted and carried out with."""

    store: ExportStore
    archives: ArchiveSource
    destination: Destination
    sealer: Sealer
    news: ExportNews
    """Of what is accepted and cancelled in this process."""
    acting_for: Callable[[Caller], AbstractContextManager[None]]
    """Makes a caller the current one during a block."""
    clock: Clock
