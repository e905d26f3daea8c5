"""The lease of the replica for a full-parameter run, which changes the shared base model.

An adapter has the lease from its creation, or from its first operation after it was parked, until it is parked or
deleted. `residency` takes and ends the lease, and `lifecycle` renews it after a restart. No operation waits for a
lease.
"""

from dataclasses import replace
from datetime import timedelta

import structlog

from twinkle_services.kit.clock import Clock
from twinkle_services.model.application.directory import AdapterDirectory
from twinkle_services.model.application.resident import ResidencyBounds
from twinkle_services.model.domain.adapter import Adapter
from twinkle_services.model.domain.errors import FullParametersDisabled, ReplicaInUse, ReplicaLeased
from twinkle_services.model.ports import Journal

_log = structlog.get_logger('lease')
_IN_USE = (
    'other adapters are in its memory or were used recently; retry when their sessions have ended or the adapters were '
    'deleted, or ask the operator for a separate replica'
)
_SUSPENDED = 'the lease of this run was ended by its session or by an operator; retry later'


class ReplicaLease:
    """Grants the exclusive use of the replica to one adapter. Concurrency: use it from one event loop only."""

    def __init__(self, journal: Journal, directory: AdapterDirectory, *, clock: Clock, bounds: ResidencyBounds) -> None:
        self._journal = journal
        self._directory = directory
        self._bounds = bounds
        self._clock = clock
        self._suspensions: dict[str, float] = {}
        """Time at which each adapter's suspension ends, on the clock's monotonic scale."""
        self.holder_id: str | None = None
        """Adapter that has the lease; None if no adapter has it."""

    def take(self, adapter_id: str, *, is_in_use: bool) -> None:
        """Grant the lease to an adapter; do nothing if the adapter already has it.

        Args:
            adapter_id: Id of the adapter.
            is_in_use: Whether other adapters are in the engine.

        Raises:
            FullParametersDisabled: The operator does not allow leases.
            ReplicaLeased: Another adapter has the lease.
            ReplicaInUse: Other adapters are in the engine or were used recently, or this adapter is suspended.
        """
        if not self._bounds.is_lease_allowed:
            raise FullParametersDisabled()
        self.check(adapter_id)
        if self.is_held_by(adapter_id):
            return
        if is_in_use or self._are_others_used():
            raise ReplicaInUse(_IN_USE)
        self._grant(adapter_id)

    def renew(self, adapter_id: str) -> None:
        """Grant the lease to the adapter that had it before a restart, before any adapter is loaded into the engine.

        Raises:
            FullParametersDisabled: The operator does not allow leases.
        """
        if not self._bounds.is_lease_allowed:
            raise FullParametersDisabled()
        self._grant(adapter_id)

    async def resume(self, adapter: Adapter, *, is_in_use: bool) -> None:
        """Grant the lease durably to an adapter that was parked; do nothing if the adapter already has it.

        Raises:
            FullParametersDisabled, ReplicaLeased, ReplicaInUse: See `take`.
            JournalUnavailable: The lease could not be recorded.
        """
        self.take(adapter.adapter_id, is_in_use=is_in_use)
        is_recorded = adapter.has_lease
        try:
            if not is_recorded:
                await self._record(adapter, has_lease=True)
            is_recorded = True
        finally:
            if not is_recorded:
                self.end(adapter.adapter_id)

    async def release(self, adapter_id: str) -> None:
        """End the lease of an adapter durably; do nothing if the adapter does not have it.

        Raises:
            JournalUnavailable: The end of the lease could not be recorded.
        """
        adapter = self._directory.find(adapter_id)
        if adapter is not None and adapter.has_lease:
            await self._record(adapter, has_lease=False)
        self.end(adapter_id)

    def check(self, adapter_id: str) -> None:
        """Check that an adapter may be used now.

        Raises:
            ReplicaLeased: Another adapter has the lease.
            ReplicaInUse: This adapter is suspended.
        """
        if self.holder_id not in (None, adapter_id):
            raise ReplicaLeased()
        if self._suspensions.get(adapter_id, 0.0) > self._clock.monotonic():
            raise ReplicaInUse(_SUSPENDED)

    def suspend(self, adapter_id: str, *, seconds: float) -> None:
        """Refuse operations of an adapter for `seconds` from now; this replaces an earlier suspension."""
        now = self._clock.monotonic()
        self._suspensions[adapter_id] = now + seconds
        self._suspensions = {held: end for held, end in self._suspensions.items() if end > now}

    def end(self, adapter_id: str) -> None:
        """End the lease of an adapter without recording it; do nothing if the adapter does not have it."""
        if self.is_held_by(adapter_id):
            _log.info('lease ended', adapter=adapter_id)
            self.holder_id = None

    def is_held_by(self, adapter_id: str) -> bool:
        """Return whether this adapter has the lease."""
        return self.holder_id == adapter_id

    def _grant(self, adapter_id: str) -> None:
        _log.info('lease granted', adapter=adapter_id)
        self.holder_id = adapter_id

    def _are_others_used(self) -> bool:
        """Return whether a LoRA adapter was created or used recently, so that an operation is likely to follow."""
        recently = self._clock.now() - timedelta(seconds=self._bounds.lease_quiet_seconds)
        # The lease excludes other full-parameter runs without this check.
        return any(
            adapter.update_time >= recently and not adapter.is_session_over and not adapter.is_full_parameter
            for adapter in self._directory.all()
        )

    async def _record(self, adapter: Adapter, *, has_lease: bool) -> None:
        await self._journal.amend(replace(adapter, has_lease=has_lease))
        self._directory.update(adapter.adapter_id, has_lease=has_lease)
