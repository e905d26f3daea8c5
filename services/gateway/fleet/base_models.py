"""Which model service holds which base model, according to each service's latest report.

A service that cannot be reached keeps its base models, because its adapters exist nowhere else.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

_HUBS = ('ms://', 'hf://')


def served_name(name: str, served: Collection[str]) -> str | None:
    """Return the served base model that a client calls `name`; None if no model or several models match.

    An exact match wins. Otherwise a model matches if the ids differ only in that one of them omits its hub.
    """
    if name in served:
        return name
    hub, plain = _split_hub(name)
    alike = [item for item in served if _split_hub(item)[1] == plain and '' in (hub, _split_hub(item)[0])]
    return alike[0] if len(alike) == 1 else None


def _split_hub(name: str) -> tuple[str, str]:
    """Return the hub prefix of a model id, empty if it has no prefix, and the rest."""
    hub = next((prefix for prefix in _HUBS if name.startswith(prefix)), '')
    return hub, name.removeprefix(hub)


@dataclass(frozen=True)
class Conflict:
    """A base model that two services hold."""

    base_model: str
    holder: str
    """Service that is used."""
    other: str
    """Service that is not used."""


class ModelTable:
    """Base models by service. If two services hold the same one, the first in the configuration is used.

    Args:
        services: names of the services in order of precedence; at least one.
    """

    def __init__(self, services: Sequence[str]) -> None:
        self.services = tuple(services)
        self._held: dict[str, frozenset[str]] = {}

    def update(self, service: str, base_models: Collection[str]) -> list[Conflict]:
        """Store the base models of a service; return the conflicts unless the report is unchanged."""
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
        """Return the service that holds a base model, or None."""
        return next((item for item in self.services if base_model in self._held.get(item, ())), None)

    def held_by(self, service: str) -> frozenset[str] | None:
        """Return the base models that a service is used for; None if it has never reported."""
        if service not in self._held:
            return None
        return frozenset(name for name in self._held[service] if self.holder_of(name) == service)

    @property
    def names(self) -> tuple[str, ...]:
        """All base models, sorted."""
        return tuple(sorted(set[str]().union(*self._held.values())))

    @property
    def is_complete(self) -> bool:
        """Whether every service has reported."""
        return len(self._held) == len(self.services)
