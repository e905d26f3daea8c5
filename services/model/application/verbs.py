"""Every verb of the service, put together over one engine and one store."""

from dataclasses import dataclass

from services.kit.clock import Clock
from services.model.application.admission import Admission
from services.model.application.create_adapter import CreateAdapter
from services.model.application.delete_adapter import DeleteAdapter
from services.model.application.directory import AdapterDirectory
from services.model.application.execute_operation import ExecuteOperation
from services.model.application.find_operation import FindOperation
from services.model.application.train_stream import TrainStream
from services.model.application.upload_batch import ReadUpload, UploadBatch
from services.model.ports import TrainerBackend, UploadStore, WeightStore


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds that the configuration sets."""

    adapters: int
    """Held at once, over all tenants."""
    lora_rank: int
    """Highest that is accepted."""
    queue_length: int
    """Operations one tenant may have under way."""
    gap_seconds: float
    """How long an operation waits for an earlier number that does not come."""


@dataclass(frozen=True, kw_only=True)
class Verbs:
    """What the service can do."""

    create_adapter: CreateAdapter
    delete_adapter: DeleteAdapter
    execute_operation: ExecuteOperation
    find_operation: FindOperation
    train_stream: TrainStream
    upload_batch: UploadBatch
    read_upload: ReadUpload
    directory: AdapterDirectory
    """Gets, lists and watches adapters; its watches are closed before the service drains."""
    vocabulary_size: int
    """Token ids are below it."""


def make_verbs(
    backend: TrainerBackend, store: WeightStore, uploads: UploadStore, *, clock: Clock, limits: Limits
) -> Verbs:
    """Return the verbs over `backend`, with weights kept in `store` and uploaded batches in `uploads`."""
    directory = AdapterDirectory()
    admission = Admission(limits.queue_length)
    execute = ExecuteOperation(directory, backend, store, admission, clock=clock, gap_seconds=limits.gap_seconds)
    return Verbs(
        create_adapter=CreateAdapter(
            directory, backend, store, clock=clock, max_lora_rank=limits.lora_rank, max_adapters=limits.adapters
        ),
        delete_adapter=DeleteAdapter(directory, backend, execute),
        execute_operation=execute,
        find_operation=FindOperation(directory, execute),
        train_stream=TrainStream(execute),
        upload_batch=UploadBatch(uploads),
        read_upload=ReadUpload(uploads),
        directory=directory,
        vocabulary_size=backend.facts().base_models[0].vocabulary_size,
    )
