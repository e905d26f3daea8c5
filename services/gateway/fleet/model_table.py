"""Base models, load and adapters of the model services, as each service last reported them."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from twinkle_services.gateway.catalogue.rules import EntryKey


@dataclass(frozen=True, kw_only=True)
class ModelReport:
    """Description of a model service, limited to the values that routing needs."""

    base_models: frozenset[str]
    journal_ids: tuple[str, ...] = ()
    """Ids of the service's journal and of the journals that it took over; empty without a durable journal."""
    free_count: int = 0
    """Number of further adapters that fit into the service's memory."""
    adapter_count: int = 0
    """Number of the service's adapters, of all tenants."""


class ModelTable:
    """Latest reports of the model services. An unreachable service keeps its base models."""

    def __init__(self, services: Sequence[str]) -> None:
        self.services = tuple(services)
        self._reports: dict[str, ModelReport] = {}
        self._unreachable: set[str] = set()
        self._created: Counter[str] = Counter()
        """Number of adapters that each service was chosen for since its latest report."""

    def update(self, service: str, report: ModelReport | None) -> None:
        """Store the report of a service; None if it did not respond."""
        if report is None:
            self._unreachable.add(service)
            return
        self._unreachable.discard(service)
        self._reports[service] = report
        del self._created[service]

    def count_creation(self, service: str) -> None:
        """Record that a service was chosen for a new adapter, which its latest report does not count yet."""
        self._created[service] += 1

    def holders_of(self, base_model: str) -> list[str]:
        """Return the services that hold a base model, in the order of the configuration."""
        return [item for item in self.services if base_model in self.held_by(item)]

    def possible_holders_of(self, base_model: str) -> list[str]:
        """Return the services that hold a base model, and those that have never reported."""
        return [item for item in self.services if item not in self._reports or base_model in self.held_by(item)]

    def by_room(self, base_model: str) -> list[str]:
        """Return the services that hold a base model, the best choice for a new adapter first.

        Services that respond come first. The next criteria are the number of adapters that still fit into the service's
        memory, highest first, the number of its adapters, lowest first, and the order in the configuration.
        """
        return sorted(self.holders_of(base_model), key=self._fullness)

    def _fullness(self, service: str) -> tuple[bool, int, int]:
        report, created = self._reports[service], self._created[service]
        return service in self._unreachable, created - report.free_count, report.adapter_count + created

    def is_reachable(self, service: str) -> bool:
        """Return whether a service responded to the latest request for its report."""
        return service in self._reports and service not in self._unreachable

    def trainer_id_of(self, service: str) -> str:
        """Return the `Creation.trainer_id` of a service: the id of its journal or, without a journal, its name."""
        ids = self._reports[service].journal_ids
        return ids[0] if ids else service

    def service_of(self, trainer_id: str) -> str | None:
        """Return the service that has the adapters of a trainer, perhaps after a takeover; None if it is unknown.

        A service that responds takes precedence over the last report of a service that does not.
        """
        found = [item for item, report in self._reports.items() if trainer_id in (*report.journal_ids, item)]
        return min(found, key=lambda item: item in self._unreachable, default=None)

    def held_by(self, service: str) -> frozenset[str]:
        """Return the base models in the latest report of a service; empty if it has never reported."""
        return self._reports[service].base_models if service in self._reports else frozenset()

    @property
    def names(self) -> tuple[str, ...]:
        """All base models, sorted."""
        return tuple(sorted(set[str]().union(*(report.base_models for report in self._reports.values()))))

    @property
    def is_complete(self) -> bool:
        """Whether every service has reported."""
        return len(self._reports) == len(self.services)


class RunOwners:
    """The service of each adapter, according to the feeds of the services."""

    def __init__(self) -> None:
        self._owners: dict[EntryKey, str] = {}
        self._synced: set[str] = set()
        """Services that have reported all their adapters."""

    def find(self, tenant_id: str, adapter_id: str) -> str | None:
        return self._owners.get((tenant_id, adapter_id))

    def add(self, service: str, key: EntryKey) -> None:
        """Record that a service has an adapter."""
        self._owners[key] = service

    def remove(self, service: str, key: EntryKey) -> bool:
        """Record that a service does not have an adapter; return False if another service has it."""
        if self._owners.get(key, service) != service:
            return False
        self._owners.pop(key, None)
        return True

    def replace(self, service: str, keys: Iterable[EntryKey]) -> None:
        """Record the complete set of a service's adapters; earlier entries of the service are removed."""
        kept = set(keys)
        for key in [key for key, owner in self._owners.items() if owner == service and key not in kept]:
            del self._owners[key]
        self._owners.update(dict.fromkeys(kept, service))
        self._synced.add(service)

    def are_synced(self, services: Iterable[str]) -> bool:
        """Return whether each of the given services has reported all its adapters."""
        return self._synced.issuperset(services)

    @property
    def keys(self) -> Collection[EntryKey]:
        """Keys of all recorded adapters."""
        return self._owners.keys()
