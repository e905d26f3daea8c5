"""Finds the model service for a call, by base model or by adapter.

An adapter belongs to the service whose feed reported it last, or that confirms having it when queried. A new adapter
goes to the service with the most free memory. The choice is stored, so that a repeated request goes to that service.
The base model of an adapter never changes, so it is cached. The services themselves check that an adapter exists, and
refuse unknown adapters and adapters of other tenants with the same error.
"""

import asyncio
import re
from collections import OrderedDict
from collections.abc import AsyncGenerator, Collection, Coroutine, Iterable, Sequence
from contextlib import aclosing
from pathlib import PurePath
from typing import Any, Never, Protocol, TypeVar

from twinkle.data_format import base_model_id, listed_base_model
from twinkle_services.gateway.catalogue.rules import Creation
from twinkle_services.gateway.catalogue.sql import SqlAssignmentStore, SqlRunStore
from twinkle_services.gateway.errors import AdapterIdTaken
from twinkle_services.gateway.fleet.model_table import ModelReport, ModelTable, RunOwners
from twinkle_services.kit.errors import BaseModelNotFound, DomainError, ServiceUnreachable

_FOLDER = re.compile(r"""(?<=['"])(?:\.{0,2}/|~)[^'"]+(?=['"])|(?<![^\s(=])/[^\s'",;]+""")
MODEL = 'model'
"""Name of the first or only model service, and name of model services in errors."""
_REMEMBERED = 1 << 16  # adapters whose base models are cached
Result = TypeVar('Result')


def served_name(name: str, served: Collection[str]) -> str | None:
    """Return the served base model that a client's `name` refers to; None if no model or several models match.

    If no id matches (see `listed_base_model`), a model matches if `name` is its `shown_name`.
    """
    found = listed_base_model(name, served)
    if found is not None:
        return found
    matches = [item for item in served if shown_name(item) == name]
    return matches[0] if len(matches) == 1 else None


def shown_name(base_model: str) -> str:
    """Return the name of a base model for clients; for a folder on the server, the last part of its path."""
    return PurePath(base_model).name if base_model.startswith(('/', './', '../', '~')) else base_model


def shown_text(text: str) -> str:
    """Return an error message in which each path on the server is replaced by its last part."""
    return _FOLDER.sub(lambda found: shown_name(found[0]), text)


class ModelFacts(Protocol):
    """Queries model services, identified by their names in `UpstreamsConfig.model_addresses`."""

    async def report(self, service: str) -> ModelReport | None:
        """Return the base models and the load of a service; None if it does not respond."""
        ...

    async def has_adapter(self, service: str, tenant_id: str, adapter_id: str) -> bool:
        """Return whether a service has a tenant's adapter, or has removed it because it was unused.

        Raises:
            DomainError: the service cannot be reached, or the query failed with another error.
        """
        ...


class ModelRoutes:
    """Finds the model service that a call belongs to, if there are several model services.

    Args:
        services: names in the order of the configuration.
        facts: queries the services.
        runs: store with the base model of each run in the catalogue.
        assignments: store with the model service that each request for a new run was assigned to.

    Concurrency: use it from one event loop only.
    """

    def __init__(
        self, services: Sequence[str], *, facts: ModelFacts, runs: SqlRunStore, assignments: SqlAssignmentStore
    ) -> None:
        self.table = ModelTable(services)
        self.owners = RunOwners()
        self._facts = facts
        self._runs = runs
        self._assignments = assignments
        self._base_models: OrderedDict[tuple[str, str], str] = OrderedDict()
        """Base model by tenant and adapter."""

    @property
    def services(self) -> Sequence[str]:
        """Names of all model services; the first one receives calls for which no service can be determined."""
        return self.table.services

    async def refresh(self) -> None:
        """Request a report from every service."""
        await asyncio.gather(*map(self._refresh_one, self.services))

    async def _refresh_one(self, service: str) -> None:
        self.table.update(service, await self._facts.report(service))

    async def settled_base_models(self) -> Collection[str]:
        """Return the base models whose services have all reported all their runs; empty if a service never reported."""
        if not self.table.is_complete:
            await self.refresh()
        if not self.table.is_complete:
            return ()
        return [name for name in self.table.names if self.owners.are_synced(self.table.holders_of(name))]

    async def run_forever(self, *, interval_seconds: float) -> Never:
        """Refresh the reports at intervals until cancelled, because the load and the base models of services change."""
        while True:
            await self.refresh()
            await asyncio.sleep(interval_seconds)

    async def holders_of(self, base_model: str) -> Sequence[str]:
        """Return the services that hold a base model, the best choice for a new adapter first.

        For an empty name, the first of all services is returned; it refuses the call.

        Raises:
            BaseModelNotFound: no service holds the base model; the error lists the base models that exist.
            ServiceUnreachable: a service that has never reported may hold the base model.
        """
        if not base_model:
            return self.services[:1]
        if holders := self.table.by_room(base_model):
            return holders
        # A service that does not respond must not delay calls for another one.
        async with aclosing(_as_completed(map(self._refresh_one, self.services))) as results:
            async for _ in results:
                if holders := self.table.by_room(base_model):
                    return holders
        if not self.table.is_complete:
            raise ServiceUnreachable(MODEL)
        raise BaseModelNotFound(base_model, self.table.names)

    async def creator_of(self, tenant_id: str, base_model: str, adapter_id: str, request_id: str) -> str:
        """Return the service that creates an adapter; a repeated request gets the same service.

        `adapter_id` may be empty. If `request_id` is also empty, a repeated request may get a different service.

        Raises:
            BaseModelNotFound, ServiceUnreachable: see `holders_of`.
            ServiceUnreachable: no service reports the trainer that the first request was assigned to, or a service
                that cannot be reached may have the adapter.
            AdapterIdTaken: the tenant has or had an adapter with this id and a different base model.
        """
        base_model = base_model_id(base_model)
        holders = await self.holders_of(base_model)
        known = await self._base_model_of(tenant_id, adapter_id) if adapter_id else ''
        # A request with the same base model may be a repetition, which the service recognizes.
        if known and known != base_model:
            raise AdapterIdTaken(adapter_id)
        if not base_model or not (adapter_id or request_id):
            return holders[0]
        if (owner := self.owners.find(tenant_id, adapter_id)) is not None and self.table.is_reachable(owner):
            return owner
        if known and (found := await self._search(self.table.possible_holders_of(base_model), tenant_id, adapter_id)):
            # The run was created before assignments were stored, for example when there was only one model service.
            return found
        creation = Creation(
            tenant_id=tenant_id,
            base_model=base_model,
            creation_key=f'adapter {adapter_id}' if adapter_id else f'request {request_id}',
            trainer_id=self.table.trainer_id_of(holders[0]),
        )
        assigned = await self._assignments.assign(creation)
        service = await self._service_of(assigned.trainer_id)
        if assigned == creation:
            self.table.count_creation(service)
        return service

    async def _service_of(self, trainer_id: str) -> str:
        """Return the service that has the adapters of a trainer (see `Creation.trainer_id`).

        Raises:
            ServiceUnreachable: no service has reported the trainer; creating the adapter elsewhere could duplicate it.
        """
        service = self.table.service_of(trainer_id)
        if service is None or not self.table.is_reachable(service):
            # The trainer may have been taken over since the latest reports.
            await self.refresh()
            service = self.table.service_of(trainer_id)
        if service is None:
            raise ServiceUnreachable(MODEL)
        return service

    async def owner_of(self, tenant_id: str, adapter_id: str) -> str | None:
        """Return the service that has a tenant's adapter; None if no service has it.

        If only one service can have the adapter, this service is returned without a query.

        Raises:
            ServiceUnreachable: a service that cannot be reached may have the adapter.
        """
        if not adapter_id:
            return None
        owner = self.owners.find(tenant_id, adapter_id)
        if owner is not None and self.table.is_reachable(owner):
            return owner
        candidates: Sequence[str] = self.services
        if base_model := await self._base_model_of(tenant_id, adapter_id):
            if not self.table.holders_of(base_model):
                await self.refresh()
            candidates = self.table.possible_holders_of(base_model)
            if len(candidates) == 1:
                return candidates[0]
            if not candidates:
                # The catalogue has the run, so its service is probably unreachable.
                raise ServiceUnreachable(MODEL)
        return await self._search(candidates, tenant_id, adapter_id)

    async def _base_model_of(self, tenant_id: str, adapter_id: str) -> str:
        """Return the base model of an adapter from the catalogue; empty if it is unknown there."""
        key = (tenant_id, adapter_id)
        if key not in self._base_models:
            run = await self._runs.get(tenant_id, adapter_id)
            if run is None or not run.base_model:
                return ''
            self._base_models[key] = run.base_model
            if len(self._base_models) > _REMEMBERED:
                self._base_models.popitem(last=False)
        return self._base_models[key]

    async def _search(self, services: Sequence[str], tenant_id: str, adapter_id: str) -> str | None:
        """Return a service that confirms having an adapter. Without one, raise ServiceUnreachable if a query failed."""
        failure: DomainError | None = None
        async with aclosing(_as_completed(self._has(item, tenant_id, adapter_id) for item in services)) as results:
            async for result in results:
                if isinstance(result, str):
                    return result
                failure = result or failure
        if failure is not None:
            raise ServiceUnreachable(MODEL) from failure
        return None

    async def _has(self, service: str, tenant_id: str, adapter_id: str) -> str | DomainError | None:
        """Return the service if it has the adapter, None if it does not, or the error of a failed query."""
        try:
            return service if await self._facts.has_adapter(service, tenant_id, adapter_id) else None
        except DomainError as error:
            return error


async def _as_completed(calls: Iterable[Coroutine[Any, Any, Result]]) -> AsyncGenerator[Result, None]:
    """Run calls concurrently and yield their results as they arrive; closing the generator cancels unfinished calls."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        for result in asyncio.as_completed(tasks):
            yield await result
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
