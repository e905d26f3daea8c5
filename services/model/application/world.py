"""The ports that the verbs are put together over."""

from dataclasses import dataclass

from services.kit.clock import Clock
from services.model.domain.plan import CostEstimator
from services.model.domain.upload import UploadStore
from services.model.ports import Journal, ModelExporter, TrainerBackend, WeightStore


@dataclass(frozen=True, kw_only=True)
class World:
    """What the service needs of the world."""

    backend: TrainerBackend
    estimator: CostEstimator
    store: WeightStore
    exporter: ModelExporter
    uploads: UploadStore
    journal: Journal
    clock: Clock
