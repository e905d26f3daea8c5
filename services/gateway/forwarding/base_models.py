"""Which model service holds which base model, as each of them said last, and which one a client means.

Pure. A service that cannot be reached keeps what it held: its adapters are there, and nobody else's.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

_HUBS = ('ms://', 'hf://')


def served_name(name: str, served: Collection[str]) -> str | None:
    """Return the base model that a client calls `name`; None where there is none, or several could be meant.

    It is the one of that name, or else the one whose id differs only in that one of both does not say its hub.
    """
    if name in served:
        return name
    hub, plain = _parts(name)
    alike = [item for item in served if _parts(item)[1] == plain and '' in (hub, _parts(item)[0])]
    return alike[0] if len(alike) == 1 else None


def _parts(name: str) -> tuple[str, str]:
    """Return the hub of an id, empty where it does not say one, and the rest."""
    hub = next((prefix for prefix in _HUBS if name.startswith(prefix)), '')
    return hub, name.removeprefix(hub)


@dataclass(frozen=True)
class Conflict:
    """A base model that two services hold."""

    base_model: str
    holder: str
    """The service that has it."""
    other: str
    """The service that is not asked for it."""


class ModelTable:
    """Knows who holds what. Of two services with one base model the first in the configuration has it."""

    def __init__(self, services: Sequence[str]) -> None:
        """Begin with nothing heard of `services`, in the order of their precedence; at least one."""
        self.services = tuple(services)
        self._held: dict[str, frozenset[str]] = {}

    def hear(self, service: str, base_models: Collection[str]) -> list[Conflict]:
        """Take in what a service holds now; return the conflicts, where that was not known before."""
        held = frozenset(base_models)
        if self._held.get(service) == held:
            return []
        self._held[service] = held
        return [
            Conflict(name, holder, other)
            for name in sorted(held)
            for holder, *others in [[item for item in self.services if name in self._held.get(item, ())]]
            for other in others
        ]

    def holder_of(self, base_model: str) -> str | None:
        """Return the service that holds a base model; None where no service said so."""
        return next((item for item in self.services if base_model in self._held.get(item, ())), None)

    def held_by(self, service: str) -> frozenset[str] | None:
        """Return the base models for which a service is asked; None where it was never heard."""
        if service not in self._held:
            return None
        return frozenset(name for name in self._held[service] if self.holder_of(name) == service)

    @property
    def names(self) -> tuple[str, ...]:
        """All base models, sorted."""
        return tuple(sorted(set[str]().union(*self._held.values())))

    @property
    def is_complete(self) -> bool:
        """Whether every service was heard."""
        return len(self._held) == len(self.services)
