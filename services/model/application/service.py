"""Creates the use cases of the model service from its ports."""

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial

from twinkle_services.kit.server_facts import ServerFacts, TrainerFacts
from twinkle_services.kit.telemetry import measures
from twinkle_services.model.application.admission import Admission, QueueLimits
from twinkle_services.model.application.carry_out import CarryOut
from twinkle_services.model.application.create_adapter import AdapterLimits, CreateAdapter
from twinkle_services.model.application.delete_adapter import DeleteAdapter
from twinkle_services.model.application.directory import AdapterDirectory
from twinkle_services.model.application.dispatcher import Dispatcher
from twinkle_services.model.application.estimate import Estimate
from twinkle_services.model.application.execute_operation import ExecuteOperation
from twinkle_services.model.application.expiry import AdapterExpiry
from twinkle_services.model.application.fetch_batch import FetchBatch
from twinkle_services.model.application.lifecycle import Cleanup, Recover
from twinkle_services.model.application.operations import Operations
from twinkle_services.model.application.park_after_session import EndLease, ParkAdapter
from twinkle_services.model.application.queues import Queues
from twinkle_services.model.application.residency import Residency
from twinkle_services.model.application.resident import ResidencyBounds
from twinkle_services.model.application.state_verbs import StateVerbRunner
from twinkle_services.model.application.take_over import TakeOver
from twinkle_services.model.application.train_stream import TrainStream
from twinkle_services.model.application.upload_batch import ReadUpload, UploadBatch
from twinkle_services.model.application.waits import Waits
from twinkle_services.model.domain.scheduler import Scheduler
from twinkle_services.model.ports import Ports


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Configured limits."""

    adapters: AdapterLimits
    """Maximum numbers of adapters."""
    lora_rank: int
    """Maximum LoRA rank."""
    batch_tokens: int
    """Maximum number of tokens of a shared batch, enough for the passes that can run at the same time."""
    batch_seconds: float | None = None
    """Target duration of a shared batch; None: batches are limited by tokens only."""
    tenant_weights: Mapping[str, float] = field(default_factory=dict[str, float])
    """Weights of competing tenants; 1 for tenants that are not listed."""
    batch_examples: int
    """Maximum number of examples of a batch."""
    queue: QueueLimits
    """Limits of each tenant's operations in progress."""
    gap_seconds: float
    """Maximum seconds that an operation waits for a missing earlier number."""
    residency: ResidencyBounds
    """Limits that determine when adapters are evicted and snapshotted."""
    unused_for: timedelta | None = None
    """Time after which an unused adapter is removed; None: never."""


@dataclass(frozen=True, kw_only=True)
class ModelService:
    """The use cases of the service."""

    create_adapter: CreateAdapter
    estimate: Estimate
    delete_adapter: DeleteAdapter
    park_adapter: ParkAdapter
    end_lease: EndLease
    take_over: TakeOver
    is_resident: Callable[[str], bool]
    """Returns whether an adapter is in the engine's memory."""
    execute_operation: ExecuteOperation
    operations: Operations
    """Finds, watches and cancels operations; close it when the service begins to shut down."""
    train_stream: TrainStream
    upload_batch: UploadBatch
    read_upload: ReadUpload
    directory: AdapterDirectory
    """Gets, lists and watches adapters; close it when the service begins to shut down."""
    facts: Callable[[], ServerFacts]
    """Returns the facts about this service, including its load."""
    recover: Recover
    """Registers the adapters of the journal; call once before serving."""
    cleanup: Cleanup
    """Evicts idle adapters and queues; call periodically."""
    expiry: AdapterExpiry
    """Removes unused adapters; call periodically, less often than `cleanup`."""
    vocabulary_size: int
    """Upper bound of token ids, exclusive."""
    max_batch_examples: int
    """Maximum number of examples of a batch."""
    observed: Callable[[], AbstractContextManager[None]]
    """Returns a context in which the queue and the adapters are reported as metrics."""
    close: Callable[[], Awaitable[None]]
    """Refuses waiting operations, and finishes running operations and pending writes."""


def make_service(ports: Ports, limits: Limits) -> ModelService:
    """Create the use cases. The adapters in the journal are unknown until `recover` has run."""
    directory = AdapterDirectory()
    residency = Residency(ports.backend, ports.journal, directory, clock=ports.clock, bounds=limits.residency)
    queues = Queues(ports.journal, residency, gap_seconds=limits.gap_seconds)
    dispatcher = _make_dispatcher(ports, residency, limits)
    fetch_batch = FetchBatch(ports.batches, ports.codec, tenant_bytes=limits.queue.request_bytes)
    carry_out = CarryOut(
        ports, directory, residency, StateVerbRunner(ports, residency), compute=dispatcher.run, fetch_batch=fetch_batch
    )
    admission = Admission(limits.queue, ports.clock)
    execute = ExecuteOperation(directory, queues, admission, carry_out, clock=ports.clock)
    create = CreateAdapter(ports, directory, residency, max_lora_rank=limits.lora_rank, limits=limits.adapters)
    operations = Operations(directory, queues, dispatcher, admission, carry_out.waits)
    delete = DeleteAdapter(directory, queues, dispatcher, carry_out.waits, residency, ports)
    park = ParkAdapter(ports, directory, residency, drop_operations=operations.drop_operations)
    recover = Recover(ports, directory, residency, create)
    return ModelService(
        create_adapter=create,
        estimate=Estimate(ports.backend, ports.estimator),
        delete_adapter=delete,
        park_adapter=park,
        end_lease=EndLease(ports.backend, residency, suspended_seconds=limits.residency.idle_seconds),
        take_over=TakeOver(ports, recover),
        is_resident=residency.is_resident,
        execute_operation=execute,
        operations=operations,
        train_stream=TrainStream(execute, queues),
        upload_batch=UploadBatch(ports.uploads),
        read_upload=ReadUpload(ports.uploads),
        directory=directory,
        facts=partial(_facts, ports, directory, residency, limits),
        recover=recover,
        cleanup=Cleanup(residency, queues),
        expiry=AdapterExpiry(ports, directory, residency, park, delete, unused_for=limits.unused_for),
        observed=partial(_observed, dispatcher, residency, directory),
        close=partial(_close, residency, carry_out.waits, dispatcher, queues, delete),
        vocabulary_size=ports.backend.facts().base_models[0].vocabulary_size,
        max_batch_examples=limits.batch_examples,
    )


def _make_dispatcher(ports: Ports, residency: Residency, limits: Limits) -> Dispatcher:
    scheduler = Scheduler(batch_tokens=limits.batch_tokens, weights=limits.tenant_weights)
    return Dispatcher(
        ports.backend, scheduler, ports.clock, batch_seconds=limits.batch_seconds, short_work=residency.short_work
    )


def _facts(ports: Ports, directory: AdapterDirectory, residency: Residency, limits: Limits) -> ServerFacts:
    free_count = (
        0 if residency.lease.holder_id is not None else limits.residency.resident_adapters - residency.resident_count
    )
    trainer = TrainerFacts(
        journal_ids=ports.journal.ids, free_adapter_count=max(0, free_count), adapter_count=len(directory)
    )
    return replace(ports.backend.facts(), trainer=trainer)


@contextmanager
def _observed(dispatcher: Dispatcher, residency: Residency, directory: AdapterDirectory) -> Iterator[None]:
    def adapters() -> Mapping[str, int]:
        resident = residency.resident_count
        return {'resident': resident, 'parked': len(directory) - resident}

    with measures.queue_length.observing(dispatcher.waiting_by_verb), measures.adapters.observing(adapters):
        yield


async def _close(
    residency: Residency, waits: Waits, dispatcher: Dispatcher, queues: Queues, delete: DeleteAdapter
) -> None:
    waits.close()
    await dispatcher.close()
    await queues.close()
    await delete.close()
    await residency.close()
