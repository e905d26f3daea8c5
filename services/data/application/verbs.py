"""Every verb of the service, put together from its ports."""

from dataclasses import dataclass

from services.data.application.apply_steps import ApplySteps
from services.data.application.create_dataset import CreateDataset, DatasetLimits
from services.data.application.delete_dataset import DeleteDataset
from services.data.application.export_dataset import ExportDataset
from services.data.application.open_loader import CloseLoader, OpenLoader
from services.data.application.read_datasets import GetDataset, ListDatasets
from services.data.application.stream_batches import StreamBatches
from services.data.application.turns import Turns
from services.data.application.uploads import Uploads
from services.data.ports import DatasetStore, LoaderStore, RowEngine
from services.kit.clock import Clock
from services.kit.uploads import UploadStore


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of what one tenant may have."""

    datasets: DatasetLimits
    upload_bytes: int
    loaders: int
    queue_length: int


@dataclass(frozen=True, kw_only=True)
class Ports:
    """The world."""

    store: DatasetStore
    loaders: LoaderStore
    uploads: UploadStore
    engine: RowEngine
    clock: Clock


@dataclass(frozen=True, kw_only=True)
class Verbs:
    """What the service can do."""

    create_dataset: CreateDataset
    uploads: Uploads
    apply_steps: ApplySteps
    get_dataset: GetDataset
    list_datasets: ListDatasets
    delete_dataset: DeleteDataset
    export_dataset: ExportDataset
    open_loader: OpenLoader
    stream_batches: StreamBatches
    close_loader: CloseLoader


def make_verbs(ports: Ports, limits: Limits) -> Verbs:
    """Return the verbs over one set of ports."""
    turns = Turns(queue_limit=limits.queue_length)
    store, loaders, uploads, engine = ports.store, ports.loaders, ports.uploads, ports.engine
    return Verbs(
        create_dataset=CreateDataset(store, engine, uploads, turns=turns, clock=ports.clock, limits=limits.datasets),
        uploads=Uploads(uploads, limit_bytes=limits.upload_bytes),
        apply_steps=ApplySteps(store, engine, loaders, turns=turns),
        get_dataset=GetDataset(store),
        list_datasets=ListDatasets(store),
        delete_dataset=DeleteDataset(store, loaders, turns=turns),
        export_dataset=ExportDataset(store),
        open_loader=OpenLoader(store, loaders, limit=limits.loaders),
        stream_batches=StreamBatches(store, loaders, engine),
        close_loader=CloseLoader(loaders),
    )
