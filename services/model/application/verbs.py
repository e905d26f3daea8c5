"""Every verb of the service, put together over one engine and one store."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from services.model.application.admission import Admission, QueueLimits
from services.model.application.cancel_operation import CancelOperation
from services.model.application.carry_out import CarryOut
from services.model.application.create_adapter import AdapterCounts, CreateAdapter
from services.model.application.delete_adapter import DeleteAdapter
from services.model.application.directory import AdapterDirectory
from services.model.application.dispatcher import Dispatcher
from services.model.application.estimate import Estimate
from services.model.application.execute_operation import ExecuteOperation
from services.model.application.fill_batch import FillBatch
from services.model.application.find_operation import FindOperation
from services.model.application.park_adapter import ParkAdapter
from services.model.application.queues import Queues
from services.model.application.recover import Recover
from services.model.application.residency import Residency, ResidencyBounds
from services.model.application.state_verbs import StateVerbs
from services.model.application.train_stream import TrainStream
from services.model.application.upkeep import Upkeep
from services.model.application.upload_batch import ReadUpload, UploadBatch
from services.model.application.watch_operations import WatchOperations
from services.model.application.world import World
from services.model.domain.scheduler import Scheduler


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds that the configuration sets."""

    adapters: AdapterCounts
    """Held at once."""
    lora_rank: int
    """Highest that is accepted."""
    pass_tokens: int
    """Tokens of different adapters that are run together; as many as the engine takes in one pass."""
    batch_seconds: float | None = None
    """About how long such a pass may take; None: as long as a full one does."""
    tenant_weights: Mapping[str, float] = field(default_factory=dict[str, float])
    """Shares of tenants that all have work; 1 for those not named."""
    queue: QueueLimits
    """Of what one tenant may have under way."""
    gap_seconds: float
    """How long an operation waits for an earlier number that does not come."""
    residency: ResidencyBounds
    """When adapters leave the engine, and when they are snapshotted."""


@dataclass(frozen=True, kw_only=True)
class Verbs:
    """What the service can do."""

    create_adapter: CreateAdapter
    estimate: Estimate
    delete_adapter: DeleteAdapter
    park_adapter: ParkAdapter
    is_resident: Callable[[str], bool]
    """Whether an adapter is in the engine's memory."""
    execute_operation: ExecuteOperation
    find_operation: FindOperation
    watch_operations: WatchOperations
    """Its watches are closed before the service drains."""
    cancel_operation: CancelOperation
    train_stream: TrainStream
    upload_batch: UploadBatch
    read_upload: ReadUpload
    directory: AdapterDirectory
    """Gets, lists and watches adapters; its watches are closed before the service drains."""
    recover: Recover
    """Runs once, before anything is served."""
    upkeep: Upkeep
    """Runs from time to time."""
    vocabulary_size: int
    """Token ids are below it."""
    close: Callable[[], Awaitable[None]]
    """Ends what runs, and waits for what is being written."""


def make_verbs(world: World, limits: Limits) -> Verbs:
    """Return the verbs over the ports given. Nothing is known of earlier adapters until `recover` has run."""
    directory = AdapterDirectory()
    residency = Residency(world.backend, world.journal, directory, clock=world.clock, bounds=limits.residency)
    queues = Queues(world.journal, residency, gap_seconds=limits.gap_seconds)
    scheduler = Scheduler(batch_tokens=limits.pass_tokens, weights=limits.tenant_weights)
    dispatcher = Dispatcher(world.backend, scheduler, world.clock, batch_seconds=limits.batch_seconds)
    tenant_bytes, is_alone = limits.queue.request_bytes, residency.lease.is_held_by
    fill_batch = FillBatch(world.batches, world.codec, tenant_bytes=tenant_bytes, is_alone=is_alone)
    carry_out = CarryOut(
        world, directory, residency, StateVerbs(world, residency), compute=dispatcher.run, fill_batch=fill_batch
    )
    execute = ExecuteOperation(directory, queues, Admission(limits.queue, world.clock), carry_out, clock=world.clock)
    create = CreateAdapter(world, directory, residency, max_lora_rank=limits.lora_rank, most=limits.adapters)

    delete = DeleteAdapter(directory, queues, dispatcher, fill_batch, residency, world.journal)

    return Verbs(
        create_adapter=create,
        estimate=Estimate(world.backend, world.estimator),
        delete_adapter=delete,
        park_adapter=ParkAdapter(world, directory, residency),
        is_resident=residency.is_resident,
        execute_operation=execute,
        find_operation=FindOperation(directory, queues, dispatcher),
        watch_operations=WatchOperations(directory, queues),
        cancel_operation=CancelOperation(directory, queues, dispatcher, fill_batch),
        train_stream=TrainStream(execute, queues),
        upload_batch=UploadBatch(world.uploads),
        read_upload=ReadUpload(world.uploads),
        directory=directory,
        recover=Recover(world, directory, residency, create),
        upkeep=Upkeep(residency, queues),
        close=partial(_close, residency, fill_batch, dispatcher, queues, delete),
        vocabulary_size=world.backend.facts().base_models[0].vocabulary_size,
    )


async def _close(
    residency: Residency, fill_batch: FillBatch, dispatcher: Dispatcher, queues: Queues, delete: DeleteAdapter
) -> None:
    residency.turn_all_away()
    fill_batch.close()
    await dispatcher.close()
    await queues.close()
    await delete.close()
    await residency.close()
