"""Who has the replica for itself: a full-parameter run changes the base model that all others share."""

from services.model.domain.errors import ReplicaLeased


class ReplicaLease:
    """At most one adapter holds it, from its creation to its end."""

    def __init__(self) -> None:
        """Begin without a holder."""
        self._holder_id: str | None = None

    @property
    def is_taken(self) -> bool:
        """Whether some adapter holds it."""
        return self._holder_id is not None

    def take(self, adapter_id: str) -> None:
        """Give it to an adapter; one that holds it keeps it.

        Raises:
            ReplicaLeased: another one holds it.
        """
        if self.excludes(adapter_id):
            raise ReplicaLeased()
        self._holder_id = adapter_id

    def end(self, adapter_id: str) -> None:
        """Take it back, if that adapter holds it."""
        if self._holder_id == adapter_id:
            self._holder_id = None

    def is_held_by(self, adapter_id: str) -> bool:
        """Say whether that adapter holds it."""
        return self._holder_id == adapter_id

    def excludes(self, adapter_id: str) -> bool:
        """Say whether another adapter than that one holds it."""
        return self._holder_id not in (None, adapter_id)
