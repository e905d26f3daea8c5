"""The ports that the verbs are put together over."""

from dataclasses import dataclass

from services.kit.clock import Clock
from services.model.domain.loader_batch import BatchSource
from services.model.domain.plan import CostEstimator
from services.model.domain.upload import UploadStore
from services.model.ports import Journal, ModelExporter, RecordCodec, TrainerBackend, WeightStore


@dataclass(frozen=True, kw_only=True)
class World:
    """What the service needs of the world."""

    backend: TrainerBackend
    estimator: CostEstimator
    store: WeightStore
    exporter: ModelExporter
    uploads: UploadStore
    batches: BatchSource
    journal: Journal
    codec: RecordCodec
    """Puts what a loader gave into its operation, as the journal keeps it."""
    clock: Clock
