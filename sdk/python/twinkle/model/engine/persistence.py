"""Engine methods that save and restore the state of an adapter."""

from twinkle.model.engine.adapter_state import AdapterState
from twinkle.model.engine.adapters import AdapterTable
from twinkle.model.engine.restoring import restore_snapshot, restored_adapter
from twinkle.model.engine.snapshot import AdapterSnapshot, take_snapshot, take_whole_snapshot
from twinkle.model.errors import ModelLeased


class Persistence(AdapterTable):
    """Exports, imports, snapshots and restores adapters."""

    def export_state(self, adapter_id: str, *, is_optimizer_included: bool, **extra: int) -> AdapterSnapshot:
        """Copy the contents of a checkpoint; `extra` are additional counters, such as the position in the data."""
        return take_snapshot(self.adapter(adapter_id), is_optimizer_included=is_optimizer_included, extra=extra)

    def import_state(self, adapter_id: str, snapshot: AdapterSnapshot, *, is_optimizer_included: bool) -> None:
        """Replace an adapter's weights and, if requested, its optimizer, schedule, counters and random state.

        A value head in the snapshot is loaded in both cases. Loss, processor and metrics are unchanged. The accumulated
        gradient is cleared, or replaced by the gradient of the snapshot if the optimizer is included.

        Raises:
            SnapshotMismatch: the snapshot does not match the adapter; nothing was changed.
        """
        restore_snapshot(
            self.adapter(adapter_id),
            snapshot,
            is_optimizer_included=is_optimizer_included,
            hidden_size=self.model.config.hidden_size,
        )

    def snapshot(self, adapter_id: str) -> AdapterSnapshot | None:
        """Copy the entire state of an adapter, including its configuration.

        Returns:
            None while a `forward` is pending, because activations cannot be saved.

        Raises:
            UnknownAdapter: the adapter does not exist.
            AdapterNotReady: a component has options that are not plain values.
        """
        state = self.adapter(adapter_id)
        return None if state.pending is not None else take_whole_snapshot(state)

    def restore_adapter(self, adapter_id: str, snapshot: AdapterSnapshot) -> AdapterState:
        """Create an adapter that continues bitwise from a `snapshot`.

        Raises:
            AdapterExists: the id is in use.
            ModelLeased: see `create_adapter` and `create_full_adapter`.
            SnapshotMismatch: the snapshot is incomplete, malformed, or of another model.
        """
        self._check_free(adapter_id)
        if snapshot.full_parameters is not None and self._adapters:
            raise ModelLeased()
        # Full-parameter runs have no owner; see `create_full_adapter`.
        owner = self._next_owner() if snapshot.full_parameters is None else None
        state = restored_adapter(adapter_id, snapshot, self.model, owner=owner)
        self._adapters[adapter_id] = state
        return state
