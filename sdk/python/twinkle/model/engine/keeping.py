"""The verbs that copy an adapter's state out and put it back."""

from twinkle.model.engine.adapter_state import AdapterState
from twinkle.model.engine.adapters import AdapterTable
from twinkle.model.engine.restoring import restore_snapshot, restored_adapter
from twinkle.model.engine.snapshot import AdapterSnapshot, take_snapshot, take_whole_snapshot
from twinkle.model.errors import ModelLeased


class Keeping(AdapterTable):
    """Exports, imports, snapshots and restores adapters."""

    def export_state(self, adapter_id: str, *, is_optimizer_included: bool, **extra: int) -> AdapterSnapshot:
        """Copy what a checkpoint holds; `extra` are counters of the caller's own, such as a data cursor."""
        return take_snapshot(self.adapter(adapter_id), is_optimizer_included=is_optimizer_included, extra=extra)

    def import_state(self, adapter_id: str, snapshot: AdapterSnapshot, *, is_optimizer_included: bool) -> None:
        """Replace an adapter's weights and, where asked for, everything else it needs to go on.

        Loss, processor and metrics stay as they are set.

        Raises:
            SnapshotMismatch: it does not fit; nothing was changed.
        """
        restore_snapshot(
            self.adapter(adapter_id),
            snapshot,
            is_optimizer_included=is_optimizer_included,
            hidden_size=self.model.config.hidden_size,
        )

    def snapshot(self, adapter_id: str) -> AdapterSnapshot | None:
        """Copy everything an adapter is, its configuration included.

        Returns:
            None while a `forward` is pending: activations are not kept.

        Raises:
            UnknownAdapter: there is none.
            AdapterNotReady: a component was given with options that are no plain values.
        """
        state = self.adapter(adapter_id)
        return None if state.pending is not None else take_whole_snapshot(state)

    def restore_adapter(self, adapter_id: str, snapshot: AdapterSnapshot) -> AdapterState:
        """Make an adapter that goes on from a `snapshot` as if nothing had been, to the bit.

        Raises:
            AdapterExists: the id is taken.
            ModelLeased: as `create_adapter` and `create_full_adapter`.
            SnapshotMismatch: the snapshot is not whole, malformed, or of another model.
        """
        self._check_free(adapter_id)
        if snapshot.full_parameters is not None and self._adapters:
            raise ModelLeased()
        state = restored_adapter(adapter_id, snapshot, self.model)
        self._adapters[adapter_id] = state
        return state
