"""What the application needs of the world: an engine that trains, and somewhere to put weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.kit.errors import DomainError
from services.kit.server_facts import ServerFacts
from services.model.domain.adapter import Adapter
from services.model.domain.loader_batch import LoadedBatch
from services.model.domain.operation import BatchVerb, ComputeVerb, Operation, Save
from services.model.domain.result import OperationResult, Outcome, PublishResult, SaveResult
from services.model.domain.training_config import TrainingConfig
from twinkle.data_format import LoraConfig, TensorData


@dataclass(frozen=True, kw_only=True)
class AdapterDescription:
    """An adapter as the engine made it."""

    lora_config: LoraConfig
    """Every default filled in, the seed included; of no meaning for the base model's own parameters."""
    training_config: TrainingConfig
    """Every default filled in."""
    parameter_count: int
    warnings: tuple[str, ...] = ()
    """What of the configuration has no effect, or not the effect one might expect."""


@dataclass(frozen=True, kw_only=True)
class AdapterState:
    """An adapter's weights, and what its trainer needs to resume."""

    lora_config: LoraConfig
    """Of no meaning with `full_parameters`."""
    adapter: Mapping[str, TensorData]
    """By peft's names, or by the base model's own."""
    full_parameters: tuple[str, ...] | None = None
    """Names that chose the base model's own parameters, none for all; None for LoRA."""
    trainer: Mapping[str, TensorData] = field(default_factory=dict[str, TensorData])
    """Optimizer, schedule, counters, random state; empty where not asked for."""
    step_count: int = 0
    left_out: tuple[str, ...] = ()
    """What the adapter has and this state has not: a value head goes with the trainer's part alone."""


@dataclass(frozen=True, kw_only=True)
class VerbRun:
    """A verb that the engine carried out."""

    outcome: Outcome
    device_seconds: float = 0.0
    wait_seconds: float = 0.0
    """From when it was ready to when it began; the dispatcher fills it in."""
    padding_token_count: int = 0
    pass_count: int = 0
    """Passes of the model it took part in."""
    pass_adapter_count: int = 0
    """Adapters that shared the fullest of them, this one included."""
    training_config: TrainingConfig | None = None
    """As in use now, where the verb changed it."""
    step_count: int | None = None
    """Optimizer steps applied so far, where the verb may have changed it."""
    warnings: tuple[str, ...] = ()
    is_divided: bool = False
    """Memory ran out and the batch was cut smaller: running it again may give other last bits."""


@dataclass(frozen=True, kw_only=True)
class BatchWork:
    """One adapter's part of a co-batched run."""

    adapter_id: str
    verb: BatchVerb


class TrainerBackend(Protocol):
    """Trains adapters on one base model. Contract suite: tests/contract/model.

    Every refusal of the InvalidArgument family is raised before any state changes.
    """

    def facts(self) -> ServerFacts:
        """Return the base model, the components known by name, and limits. Cheap."""
        ...

    async def create_adapter(
        self,
        adapter_id: str,
        lora_config: LoraConfig,
        training_config: TrainingConfig,
        *,
        full_parameters: Sequence[str] | None = None,
    ) -> AdapterDescription:
        """Make an adapter with fresh weights, or train the base model's own where `full_parameters` is given.

        The base model's own, those that a name chooses or all, need it alone; deleting the adapter puts them back.

        Raises:
            InvalidField, UnknownComponent: a part is of no use; named from `lora_config` or `training_config`.
        """
        ...

    async def delete_adapter(self, adapter_id: str) -> None:
        """Free an adapter; one that is not there is no error."""
        ...

    async def run(self, adapter_id: str, verb: ComputeVerb) -> VerbRun:
        """Carry out a verb.

        Raises:
            InvalidField, UnknownComponent, BatchTooLarge: refused; nothing changed. Fields are named
                from the verb, such as `features[2].labels` or `training_config.optimizer`.
            AdapterNotReady, LossNotFinite: it could not be done; gradients and weights are as before.
        """
        ...

    async def run_batch(self, works: Sequence[BatchWork]) -> Sequence[VerbRun | DomainError]:
        """Carry out verbs of different adapters together; at most one of each adapter.

        Returns:
            In the order of `works`: what `run` would return or raise. Each is to the bit what it would be alone on
            the reference backend, and one that fails leaves the others as they are.
        """
        ...

    async def snapshot(self, adapter_id: str) -> AdapterState | None:
        """Return a copy of everything the adapter is; None while the activations of a Forward are kept."""
        ...

    async def restore_adapter(self, adapter_id: str, state: AdapterState) -> VerbRun:
        """Make an adapter from `snapshot`'s result; whatever follows is to the bit what it would have been.

        Replaces an adapter of that id if there is one.

        Raises:
            InvalidField: the state is malformed; nothing changed.
        """
        ...

    async def export_state(
        self, adapter_id: str, *, is_trainer_included: bool, consumed_train_samples: int | None = None
    ) -> AdapterState:
        """Return a copy of the adapter's weights and, if asked, its trainer's state, with the data cursor in it."""
        ...

    async def import_state(self, adapter_id: str, state: AdapterState, *, is_trainer_included: bool) -> VerbRun:
        """Replace the adapter's weights and, if asked, its trainer's state; all of it or nothing.

        Whatever waits for its Backward is dropped. The outcome is a `LoadResult`.

        Raises:
            InvalidField: the state is of another shape than the adapter, or lacks the trainer's part.
        """
        ...

    async def close(self) -> None:
        """Free everything."""
        ...


class WeightStore(Protocol):
    """Keeps versions and checkpoints; acts for the current caller."""

    async def publish_version(
        self, adapter_id: str, state: AdapterState, *, base_model: str, version: int, is_pinned: bool
    ) -> PublishResult:
        """Make `state` a version; the same version with the same state again is harmless.

        Raises:
            DomainError: as the contract of Publish says.
        """
        ...

    async def save(
        self, adapter_id: str, state: AdapterState, *, base_model: str, save: Save, request_id: str
    ) -> SaveResult:
        """Make `state` a durable checkpoint; the same request with the same state again is harmless.

        Raises:
            DomainError: as the contract of Publish says.
        """
        ...

    async def fetch(self, checkpoint_path: str, *, is_trainer_included: bool) -> AdapterState:
        """Return a checkpoint's state.

        Raises:
            CheckpointNotFound, ServiceUnreachable: it cannot be had.
        """
        ...


class ModelExporter(Protocol):
    """Writes merged models to disk."""

    async def export_merged(self, adapter_id: str, state: AdapterState, *, name: str) -> SaveResult:
        """Write the base model with the adapter's weights merged into it, as a plain model folder.

        A folder of that name that this adapter exported before is replaced; it is never seen half written.

        Raises:
            InvalidField: the adapter cannot be merged.
            ExportUnavailable: the disk refused it, or the same export is being written.
        """
        ...

    async def close(self) -> None:
        """End, once what is being written is."""
        ...


@dataclass(frozen=True, kw_only=True)
class CreationRecord:
    """What made an adapter, so that the same request again finds it."""

    tenant_id: str
    request_id: str
    fingerprint: str
    adapter_id: str


@dataclass(frozen=True, kw_only=True)
class JournaledAdapter:
    """An adapter as the journal has it."""

    adapter: Adapter
    """As it was when the last outcome was noted."""
    is_settled: bool
    """Whether every accepted operation has its outcome on record; else replay has to find it."""


@dataclass(frozen=True, kw_only=True)
class JournalEntry:
    """An accepted operation, to be replayed."""

    operation: Operation
    outcome: OperationResult | DomainError | None
    """None where the service ended before it was noted: replay gives it again."""


@dataclass(frozen=True, kw_only=True)
class RecordEntry:
    """What answers a repeat of an operation."""

    sequence_number: int
    fingerprint: str
    outcome: OperationResult | DomainError | None
    """None where it is not known yet."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """An adapter's whole state after an operation."""

    sequence_number: int
    """The last operation in it; 0 for none."""
    adapter: Adapter
    """As it was then."""
    state: AdapterState | None
    """None only before the first operation: made afresh from the adapter's configuration and seed."""


class RecordCodec(Protocol):
    """Bytes of what the journal keeps. Total on what it wrote itself; opaque to the journal."""

    def operation_from_bytes(self, payload: bytes) -> Operation:
        """Return the operation whose `payload` this is."""
        ...

    def filled(self, operation: Operation, loaded: LoadedBatch) -> Operation:
        """Return an operation with what its loader gave, its fingerprint as it was, or raise InvalidField."""
        ...

    def outcome_to_bytes(self, outcome: OperationResult | DomainError) -> bytes:
        """Return an outcome as bytes."""
        ...

    def outcome_from_bytes(self, data: bytes) -> OperationResult | DomainError:
        """Return the outcome; an error keeps its code, reason, facts and words, not its class."""
        ...

    def adapter_to_bytes(self, adapter: Adapter) -> bytes:
        """Return an adapter as bytes, its tenant included."""
        ...

    def adapter_from_bytes(self, data: bytes) -> Adapter:
        """Return the adapter."""
        ...


class Journal(Protocol):
    """Keeps what it takes to make every adapter again, to the bit. Contract suite: tests/contract/model.

    What a method is said to make durable survives kill -9 and loss of power once it returns, and every method that
    writes may raise JournalUnavailable, with nothing recorded. Concurrency: for one event loop; many calls at once
    share one write (group commit). The operations of one adapter come one after the other.
    """

    async def adapters(self) -> Sequence[JournaledAdapter]:
        """Return every adapter, oldest first."""
        ...

    async def creations(self) -> Sequence[CreationRecord]:
        """Return the last requests that made adapters, deleted ones included, oldest first."""
        ...

    async def creation_of(self, adapter_id: str) -> CreationRecord | None:
        """Return what made an adapter, deleted ones included; None where the id was never used."""
        ...

    async def add_adapter(
        self, adapter: Adapter, creation: CreationRecord, *, origin: Adapter, state: AdapterState | None
    ) -> None:
        """Record a new adapter, durably.

        Args:
            adapter: as it is.
            creation: what made it.
            origin: as it was asked for: its configuration and seed make the same weights again.
            state: where it begins with other than fresh weights.
        """
        ...

    async def remove_adapter(self, adapter_id: str) -> None:
        """Forget an adapter and all that belongs to it, durably; one that is not there is no error."""
        ...

    async def accept(self, operation: Operation) -> None:
        """Record that an operation is carried out, durably; takes the place of one that was never noted."""
        ...

    async def revoke(self, operation: Operation) -> None:
        """Strike an accepted operation that was refused, durably; its number is free again."""
        ...

    def note(self, adapter: Adapter, operation: Operation, outcome: OperationResult | DomainError) -> None:
        """Record an outcome and what the adapter is after it, with the next write; replay could give both again."""
        ...

    async def settle(
        self,
        adapter: Adapter,
        operation: Operation,
        outcome: OperationResult | DomainError,
        *,
        state: AdapterState | None = None,
        undone_from: int | None = None,
    ) -> None:
        """Accept and note a state verb in one, durably.

        Args:
            adapter: as it is after it.
            operation: it is kept for repeats alone, and never replayed.
            outcome: what came of it.
            state: a snapshot, where the operation changed the state.
            undone_from: operations from this number on, this one left out, are history that was undone.
        """
        ...

    async def add_snapshot(self, snapshot: Snapshot) -> None:
        """Keep a snapshot, durably; what no undo, repeat or restore needs any more may be dropped."""
        ...

    async def amend(self, adapter: Adapter) -> None:
        """Record what an adapter is after its last operation, durably; nothing where a later one is on record."""
        ...

    async def snapshot_before(self, adapter_id: str, *, at_most: int | None = None) -> Snapshot:
        """Return the newest snapshot that is whole, of at most that operation.

        Raises:
            AdapterNotFound: there is no such adapter.
            AdapterDamaged: none can be read.
        """
        ...

    async def entries(self, adapter_id: str, *, after: int, until: int | None = None) -> Sequence[JournalEntry]:
        """Return the operations to replay after a snapshot, in order; those of the state verbs are left out.

        Raises:
            AdapterDamaged: one is missing or cannot be read, or changed the state by other than replay.
        """
        ...

    async def record(self, adapter_id: str, *, size: int) -> Sequence[RecordEntry]:
        """Return the last `size` operations, in order."""
        ...

    async def applied_steps(self, adapter_id: str) -> Sequence[int]:
        """Return the numbers of the operations that applied a step and can still be undone, in order."""
        ...

    async def close(self) -> None:
        """Write what waits, and end."""
        ...
