"""Resolution of adapter names: each model handle names its adapters, and samplers look the names up."""

import weakref
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class _Named:
    """A name that a handle assigned to an adapter."""

    owner: 'weakref.ref[object]'
    base_model: str
    name: str
    adapter_id: str


class AdapterNames:
    """Adapter names of all model handles of a client. Different handles may use the same name."""

    def __init__(self) -> None:
        self._known: list[_Named] = []

    def add(self, owner: object, name: str, adapter_id: str, *, base_model: str) -> None:
        """Register a name, replacing the same name of `owner` and of handles that no longer exist.

        Args:
            owner: Model handle; only a weak reference is stored.
            name: Name of the adapter, not empty.
            adapter_id: Id of the adapter.
            base_model: Base model of the adapter.
        """
        self._known = [
            item
            for item in self._known
            if (item.name, item.base_model) != (name, base_model) or item.owner() not in {None, owner}
        ]
        self._known.append(_Named(weakref.ref(owner), base_model, name, adapter_id))

    def remove(self, owner: object, adapter_id: str) -> None:
        """Remove the names that `owner` assigned to an adapter."""
        self._known = [item for item in self._known if item.owner() is not owner or item.adapter_id != adapter_id]

    def find(self, name: str, *, base_model: str = '', preferred: Collection[str] = ()) -> str:
        """Return the id of the adapter with a name. An unknown name is returned unchanged, as an id.

        Names of a deleted handle remain valid until an existing handle uses the same name.

        Args:
            name: Name passed to `add_adapter_to_model`, or an adapter's id.
            base_model: Prefer adapters of this base model. Empty: no preference.
            preferred: Ids to prefer if several adapters have the name.

        Raises:
            ValueError: The name is ambiguous.
        """
        matches = [item for item in self._known if item.name == name]
        matches = [item for item in matches if item.base_model == base_model] or matches
        matches = [item for item in matches if item.owner() is not None] or matches[-1:]
        ids = {item.adapter_id for item in matches}
        chosen = ids.intersection(preferred) if len(ids) > 1 else ids
        if not ids:
            return name
        if len(chosen) != 1:
            raise ValueError(
                f'adapter_name {name!r} is ambiguous: several model handles use it, for {", ".join(sorted(ids))}; '
                f'pass the id instead, `model.adapter_id({name!r})`'
            )
        return chosen.pop()
