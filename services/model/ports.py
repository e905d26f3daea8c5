"""Ports of the model service: training engine, store of weights, model exporter, journal and codec of its records."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from twinkle.data_format import LoraConfig
from twinkle_services.kit.clock import Clock
from twinkle_services.kit.errors import DomainError
from twinkle_services.kit.resumable_uploads import UploadStore
from twinkle_services.kit.server_facts import ServerFacts
from twinkle_services.model.domain.adapter import Adapter, CreationRecord, ExpiredAdapter
from twinkle_services.model.domain.engine import AdapterDescription, AdapterState, BatchPart, UnfinishedVerb, VerbRun
from twinkle_services.model.domain.journal import JournaledAdapter, JournalEntry, RecordEntry, Snapshot
from twinkle_services.model.domain.loader_batch import BatchSource, LoadedBatch
from twinkle_services.model.domain.operation import ComputeVerb, Operation, Save
from twinkle_services.model.domain.plan import CostEstimator
from twinkle_services.model.domain.result import OperationResult, PublishResult, SaveResult
from twinkle_services.model.domain.training_config import TrainingConfig


class TrainerBackend(Protocol):
    """Trains adapters on one base model. Contract suite: tests/contract/model.

    Errors of the InvalidArgument family, except BatchTooLarge, are raised before any state changes.
    """

    def facts(self) -> ServerFacts:
        """Return the base model, the available components and the limits; the call does not block."""
        ...

    async def create_adapter(
        self,
        adapter_id: str,
        lora_config: LoraConfig,
        training_config: TrainingConfig,
        *,
        full_parameters: Sequence[str] | None = None,
    ) -> AdapterDescription:
        """Create an adapter with fresh weights, or one that trains the parameters `full_parameters` of the base model.

        Full-parameter training needs the base model exclusively; deleting the adapter restores the base model.

        Raises:
            InvalidField, UnknownComponent: The configuration is invalid; field paths start with `lora_config`,
                `full_parameters` or `training_config`.
            ReplicaLeased: A full-parameter adapter exists, or `full_parameters` is given and any other adapter exists.
        """
        ...

    async def delete_adapter(self, adapter_id: str) -> None:
        """Delete an adapter; do nothing if it does not exist."""
        ...

    async def run(self, adapter_id: str, verb: ComputeVerb) -> VerbRun:
        """Run a verb.

        Raises:
            AdapterNotFound: The engine has no such adapter.
            InvalidField, UnknownComponent: The verb was refused and nothing changed. Field paths are relative to the
                verb, such as `features[2].labels` or `training_config.optimizer`.
            BatchTooLarge: The batch has too many tokens, or memory ran out. A verb without a batch may have changed
                a part of the adapter's state.
            AdapterNotReady, LossNotFinite: The verb failed; gradients and weights are unchanged.
        """
        ...

    async def run_pass(self, parts: Sequence[BatchPart]) -> Sequence[VerbRun | UnfinishedVerb | DomainError]:
        """Run the next pass of verbs, at most one per adapter.

        Only `run_pass` and `abandon` may be called for an adapter with an unfinished verb.

        Returns:
            For each part, in order, the result or error of `run`, or `UnfinishedVerb` if the verb needs more passes. On
            CPUs, each result is bitwise equal to that of the part alone. A failed part does not affect the others.
        """
        ...

    async def abandon(self, adapter_id: str) -> None:
        """Undo the adapter's unfinished verb, if there is one."""
        ...

    async def snapshot(self, adapter_id: str) -> AdapterState | None:
        """Return a copy of the adapter's state, or None while the activations of a Forward are in memory."""
        ...

    async def restore_adapter(self, adapter_id: str, state: AdapterState) -> VerbRun:
        """Create or replace an adapter from a result of `snapshot`; the adapter continues bitwise identically.

        Raises:
            InvalidField: The state is malformed; nothing changed.
        """
        ...

    async def export_state(
        self, adapter_id: str, *, is_trainer_included: bool, consumed_train_samples: int | None = None
    ) -> AdapterState:
        """Return a copy of the weights and, if requested, the trainer's state, with the data cursor if it is given."""
        ...

    async def import_state(self, adapter_id: str, state: AdapterState, *, is_trainer_included: bool) -> VerbRun:
        """Replace the weights and, if requested, the trainer's state, atomically; the outcome is a `LoadResult`.

        The accumulated gradient and a Forward without Backward are dropped.

        Raises:
            InvalidField: The state does not fit the adapter, or lacks the trainer's state.
        """
        ...

    async def close(self) -> None:
        """Release all resources."""
        ...


class WeightStore(Protocol):
    """Stores versions and checkpoints on behalf of the current caller.

    Errors are DomainErrors with their original reason. For `publish_version` and `save`, see `WeightStreamService`.
    """

    async def publish_version(
        self, adapter_id: str, state: AdapterState, *, base_model: str, version: int, is_pinned: bool
    ) -> PublishResult:
        """Store `state` as a version; repeating the call with the same state has no effect."""
        ...

    async def save(
        self, adapter_id: str, state: AdapterState, *, base_model: str, save: Save, request_id: str
    ) -> SaveResult:
        """Store `state` as a checkpoint; repeating the request with the same state has no effect."""
        ...

    async def fetch(self, checkpoint_path: str, *, is_trainer_included: bool) -> AdapterState:
        """Return a checkpoint's state.

        Raises:
            InvalidField: The checkpoint has a different base model, or lacks the requested state of the trainer.
            DomainError: The store cannot be reached, or the checkpoint is missing or damaged.
        """
        ...

    async def has_lasting_checkpoint(self, checkpoint_path: str) -> bool:
        """Return whether the checkpoint exists, does not expire, and is undamaged.

        Raises:
            ServiceUnreachable, StoreUnavailable: The checkpoint cannot be read now.
        """
        ...

    async def delete_versions(self, adapter_id: str) -> None:
        """Delete the versions of a deleted adapter, except pinned ones; repeating the call has no effect."""
        ...


class ModelExporter(Protocol):
    """Writes merged models to disk."""

    async def export_merged(self, adapter: Adapter, state: AdapterState, *, name: str) -> SaveResult:
        """Write the base model with the adapter merged into it, as a plain model folder.

        An earlier export of this adapter under the same name is replaced atomically.

        Raises:
            InvalidField: The adapter cannot be merged.
            QuotaExceeded, DiskFull: The tenant has too many merged models, or the disk is full; nothing was written.
            ExportUnavailable: The disk failed, or the same export is already running.
        """
        ...

    async def close(self) -> None:
        """Wait for the running export, and stop the exporter."""
        ...


class RecordCodec(Protocol):
    """Serializes and parses the journal's records. The journal itself treats them as opaque bytes."""

    def operation_from_bytes(self, payload: bytes) -> Operation:
        """Parse an operation's `payload`."""
        ...

    def with_batch(self, operation: Operation, loaded: LoadedBatch) -> Operation:
        """Return an operation with its loader's batch and an unchanged fingerprint.

        Raises:
            InvalidField: The batch is malformed or has too many examples.
        """
        ...

    def outcome_to_bytes(self, outcome: OperationResult | DomainError) -> bytes:
        """Serialize an outcome."""
        ...

    def outcome_from_bytes(self, data: bytes) -> OperationResult | DomainError:
        """Parse an outcome; an error keeps its code, reason, metadata and message, but not its class."""
        ...

    def adapter_to_bytes(self, adapter: Adapter) -> bytes:
        """Serialize an adapter, including its tenant."""
        ...

    def adapter_from_bytes(self, data: bytes) -> Adapter:
        """Parse an adapter."""
        ...


class Journal(Protocol):
    """Stores all data needed to rebuild each adapter bitwise. Contract suite: tests/contract/model.

    A durable write survives `kill -9` and a power loss once the method returns. Every asynchronous method may raise
    JournalUnavailable; a method that writes has then recorded nothing. Concurrent writes share one commit. Callers
    write the operations of one adapter one at a time.

    Concurrency: use it from one event loop only.
    """

    async def adapters(self) -> Sequence[JournaledAdapter]:
        """Return all adapters, oldest first."""
        ...

    async def damaged_adapters(self) -> Mapping[str, str]:
        """Return the tenants of the adapters whose records were damaged, by adapter id; `adapters` omits them."""
        ...

    async def creations(self) -> Sequence[CreationRecord]:
        """Return the latest creation requests, including those of deleted adapters, oldest first."""
        ...

    async def creation_of(self, adapter_id: str) -> CreationRecord | None:
        """Return the request that created an adapter, even a deleted one; None if the id was never used."""
        ...

    async def add_adapter(
        self, adapter: Adapter, creation: CreationRecord, *, origin: Adapter, state: AdapterState | None
    ) -> None:
        """Record a new adapter durably.

        Args:
            adapter: The adapter.
            creation: The request that created it.
            origin: The adapter as requested; its configuration and seed recreate the same weights.
            state: Initial state; None if the weights are fresh.
        """
        ...

    async def remove_adapter(self, adapter_id: str, *, expired: ExpiredAdapter | None = None) -> None:
        """Delete an adapter, except its creation request, and record `expired`, durably; ignore an unknown adapter."""
        ...

    async def expired_adapters(self) -> Sequence[ExpiredAdapter]:
        """Return the latest `MAX_EXPIRED` records of expired adapters, oldest first."""
        ...

    async def accept(self, operation: Operation) -> None:
        """Record a running operation durably, replacing an operation that has the same number and no outcome."""
        ...

    async def begin_attempt(self, operation: Operation) -> int:
        """Count an attempt to replay an accepted operation, and return the number of attempts once it is durable.

        The count begins at 0. An attempt remains counted only if the process ends before `end_attempt`.
        """
        ...

    def end_attempt(self, operation: Operation) -> None:
        """Reset the count of attempts with the next commit, because the process survived the replay."""
        ...

    async def count_attempt(self, work: str) -> int:
        """Count an attempt at work that is not a recorded operation, and return the durable number of attempts.

        An attempt remains counted only if the process ends before `reset_attempts`.

        Args:
            work: Name of the work, such as `restores of ad-1`.
        """
        ...

    async def note_progress(self, work: str, *, position: int) -> None:
        """Set the count of `work` to 1, durably, if no attempt since its last reset has reached `position`."""
        ...

    def reset_attempts(self, work: str) -> None:
        """Reset the count of `work` with the next commit, because the process survived or made progress."""
        ...

    async def revoke(self, operation: Operation) -> None:
        """Delete a refused operation durably, so that its number can be used again."""
        ...

    def note(self, adapter: Adapter, operation: Operation, outcome: OperationResult | DomainError) -> None:
        """Record an outcome and the adapter after it with the next commit; replay can recompute both."""
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
        """Record an operation that is not replayed, such as a state verb, and its outcome, durably.

        Args:
            adapter: The adapter after the operation.
            operation: The operation, which is stored only to recognize repeats and is never replayed.
            outcome: Outcome of the operation.
            state: The adapter's new state, stored as a snapshot; None if the operation did not change it.
            undone_from: First operation that was undone, None if no operation was; it is earlier than `operation`.
        """
        ...

    async def add_snapshot(self, snapshot: Snapshot) -> None:
        """Store a snapshot durably; data that no undo, repeat or restore needs any more may be deleted."""
        ...

    async def amend(self, adapter: Adapter) -> None:
        """Replace an adapter's record durably; do nothing if the stored one includes a later operation."""
        ...

    async def snapshot_before(self, adapter_id: str, *, at_most: int | None = None) -> Snapshot:
        """Return the newest intact snapshot whose last operation has a number of at most `at_most`; None for no limit.

        Raises:
            AdapterNotFound: There is no such adapter.
            AdapterDamaged: No such snapshot can be read.
        """
        ...

    async def entries(self, adapter_id: str, *, after: int, until: int | None = None) -> Sequence[JournalEntry]:
        """Return the operations to replay after number `after`, up to and including `until` (None: the last one).

        The operations are in order. Those that did not change the adapter's state, such as saves, are left out.

        Raises:
            AdapterDamaged: An operation is missing, unreadable, or changed the state in a way that replay cannot
                repeat.
        """
        ...

    async def record(self, adapter_id: str, *, size: int) -> Sequence[RecordEntry]:
        """Return the last `size` operations, in order; raise AdapterDamaged if a record cannot be read."""
        ...

    async def applied_steps(self, adapter_id: str) -> Sequence[int]:
        """Return the numbers of the operations that applied a step and can still be undone, in order."""
        ...

    @property
    def ids(self) -> Sequence[str]:
        """Ids of this journal and of the journals that it took over; empty if this journal is not durable."""
        ...

    async def take_over(self, trainer: str) -> Sequence[JournaledAdapter]:
        """Move the content of an ended trainer's journal to this one, durably, and return the new adapters.

        Repeated calls return them again until `complete_take_over`. The other journal remains usable, without its
        adapters. A call that was interrupted must be repeated before the other trainer can start again.

        Raises:
            InvalidField: The configuration names no such trainer; the field is `trainer`.
            TakeoverRefused: The trainer is running, or its journal cannot be used; no adapter was moved.
        """
        ...

    async def complete_take_over(self) -> None:
        """Add the journals that were taken over to `ids`. Call this once their adapters are registered.

        Raises:
            JournalUnavailable: A disk failed; repeat the takeover.
        """
        ...

    @property
    def was_killed(self) -> bool:
        """Whether the previous process that used the journal ended without closing it."""
        ...

    async def close(self) -> None:
        """Commit pending writes and close."""
        ...


@dataclass(frozen=True, kw_only=True)
class Ports:
    """All ports of the service."""

    backend: TrainerBackend
    estimator: CostEstimator
    store: WeightStore
    exporter: ModelExporter
    uploads: UploadStore
    batches: BatchSource
    journal: Journal
    codec: RecordCodec
    """Inserts loader batches into operations, in the journal's format."""
    clock: Clock
