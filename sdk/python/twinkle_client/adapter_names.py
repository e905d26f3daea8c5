"""Which adapter a name means: every model handle gives names of its own, and samplers look them up."""

import weakref
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class _Named:
    """A name that a handle gave."""

    owner: 'weakref.ref[object]'
    base_model: str
    name: str
    adapter_id: str


class AdapterNames:
    """What the handles of one client call their adapters. Two handles may use one name, each for its own."""

    def __init__(self) -> None:
        """Know no name."""
        self._known: list[_Named] = []

    def add(self, owner: object, name: str, adapter_id: str, *, base_model: str) -> None:
        """Note a name; what `owner`, or a handle that is gone, called so before is forgotten.

        Args:
            owner: the handle; only watched, never kept.
            name: not empty.
            adapter_id: what it means to `owner`.
            base_model: which the adapter is of.
        """
        self._known = [
            item
            for item in self._known
            if (item.name, item.base_model) != (name, base_model) or item.owner() not in {None, owner}
        ]
        self._known.append(_Named(weakref.ref(owner), base_model, name, adapter_id))

    def remove(self, owner: object, adapter_id: str) -> None:
        """Forget what `owner` calls an adapter."""
        self._known = [item for item in self._known if item.owner() is not owner or item.adapter_id != adapter_id]

    def find(self, name: str, *, base_model: str = '', favoured: Collection[str] = ()) -> str:
        """Return the id of the adapter that a name means; what is nobody's name is taken for an id.

        A handle that is gone still names its adapters, unless one that lives uses the name.

        Args:
            name: that was given to `add_adapter_to_model`, or an adapter's id.
            base_model: its adapters come before those of others. Empty: none does.
            favoured: ids that come before others of the same name.

        Raises:
            ValueError: several handles call different adapters so.
        """
        fitting = [item for item in self._known if item.name == name]
        fitting = [item for item in fitting if item.base_model == base_model] or fitting
        fitting = [item for item in fitting if item.owner() is not None] or fitting[-1:]
        ids = {item.adapter_id for item in fitting}
        meant = ids.intersection(favoured) if len(ids) > 1 else ids
        if not ids:
            return name
        if len(meant) != 1:
            raise ValueError(
                f'adapter_name {name!r} is the name of several adapters, {", ".join(sorted(ids))}, each in a model '
                f'handle of its own; give the id of the one that is meant, which is `model.adapter_id({name!r})`'
            )
        return meant.pop()
