"""Values that a journal stores and returns: adapters, operations to replay, recorded outcomes, and snapshots."""

from dataclasses import dataclass

from twinkle_services.kit.errors import DomainError
from twinkle_services.model.domain.adapter import Adapter
from twinkle_services.model.domain.engine import AdapterState
from twinkle_services.model.domain.operation import Operation
from twinkle_services.model.domain.result import OperationResult


@dataclass(frozen=True, kw_only=True)
class JournaledAdapter:
    """An adapter as stored in the journal."""

    adapter: Adapter
    """State after the last recorded outcome."""
    is_settled: bool
    """True if every accepted operation has a recorded outcome; otherwise replay recomputes the missing ones."""


@dataclass(frozen=True, kw_only=True)
class JournalEntry:
    """An accepted operation to replay."""

    operation: Operation
    outcome: OperationResult | DomainError | None
    """Recorded outcome; None if the process stopped before recording it. Replay then computes the outcome."""


@dataclass(frozen=True, kw_only=True)
class RecordEntry:
    """The record of an operation, with which a repeat of the operation is answered."""

    sequence_number: int
    fingerprint: str
    outcome: OperationResult | DomainError | None
    """None if the outcome is not known yet."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """State of an adapter after an operation."""

    sequence_number: int
    """Last operation included; 0 before the first."""
    adapter: Adapter
    """The adapter after that operation."""
    state: AdapterState | None
    """None only before the first operation; the adapter is then created from its configuration and seed."""
