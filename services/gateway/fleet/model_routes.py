"""Finds the model service for a call, by base model or by adapter.

The latest report of each service determines which base models the service holds. A service that cannot be reached keeps
its base models, because its adapters exist nowhere else. The base model of an adapter never changes, so it is cached.
The services themselves check that an adapter exists, and refuse unknown adapters and adapters of other tenants with the
same error.
"""

import asyncio
import re
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Never, Protocol, TypeVar

import structlog

from services.gateway.catalogue.ports import RunStore
from services.gateway.errors import AdapterIdTaken
from services.kit.errors import BaseModelNotFound, DomainError, ServiceUnreachable
from twinkle.data_format import base_model_id

_HUBS = ('ms://', 'hf://')
_FOLDER = re.compile(r"""(?<=['"])(?:\.{0,2}/|~)[^'"]+(?=['"])|(?<![^\s(=])/[^\s'",;]+""")
MODEL = 'model'
"""Name of the first or only model service, and of the kind of service in errors."""
_REMEMBERED = 1 << 16  # adapters whose base models are cached
Result = TypeVar('Result')
_log = structlog.get_logger('models')


def served_name(name: str, served: Collection[str]) -> str | None:
    """Return the served base model that a client's `name` refers to; None if no model or several models match.

    An exact match, or the alias of a built-in model, wins. Otherwise a model matches if the two ids are equal except
    for a hub prefix of one of them, or else if `name` is the shown name of the model's folder.
    """
    name = base_model_id(name)
    if name in served:
        return name
    hub, plain = _split_hub(name)
    matches = [item for item in served if _split_hub(item)[1] == plain and '' in (hub, _split_hub(item)[0])]
    matches = matches or [item for item in served if shown_name(item) == name]
    return matches[0] if len(matches) == 1 else None


def shown_name(base_model: str) -> str:
    """Return the name of a base model for clients: of a folder on the server, only the last part of its path."""
    return PurePath(base_model).name if base_model.startswith(('/', './', '../', '~')) else base_model


def shown_text(text: str) -> str:
    """Return an error message in which folders of the server are replaced by their last part."""
    return _FOLDER.sub(lambda found: shown_name(found[0]), text)


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
    """Base models by service. If several of the `services` hold the same base model, the first of them is used."""

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


class ModelFacts(Protocol):
    """Queries model services, identified by their names in `UpstreamsConfig.model_addresses`."""

    async def base_models(self, service: str) -> Collection[str] | None:
        """Return the base models of a service; None if it does not respond."""
        ...

    async def has_adapter(self, service: str, tenant_id: str, adapter_id: str) -> bool:
        """Return whether a service has a tenant's adapter, or has removed it because it was unused.

        Raises:
            DomainError: The service cannot be reached now.
        """
        ...


class ModelRoutes(Protocol):
    """Finds the model service that a call belongs to."""

    @property
    def services(self) -> Sequence[str]:
        """Names of all model services; the first one handles calls that belong to no service."""
        ...

    def known_base_models(self, service: str) -> Collection[str]:
        """Return the base models that a service is used for, according to its latest report; empty if unknown."""
        ...

    async def holder_of(self, base_model: str) -> str:
        """Return the service that holds a base model, or for an empty name the first service, which refuses the call.

        Raises:
            BaseModelNotFound: No service holds the base model; the error lists the base models that exist.
            ServiceUnreachable: A service that has never reported may hold the base model.
        """
        ...

    async def creator_of(self, tenant_id: str, base_model: str, adapter_id: str) -> str:
        """Return the service that creates an adapter; `adapter_id` may be empty.

        Raises:
            BaseModelNotFound, ServiceUnreachable: See `holder_of`.
            AdapterIdTaken: The tenant has or had an adapter with this id and another base model.
        """
        ...

    async def owner_of(self, tenant_id: str, adapter_id: str) -> str | None:
        """Return the service that has a tenant's adapter; None if no service has it, so any service can refuse a call.

        Raises:
            ServiceUnreachable: A service that cannot be reached may have the adapter.
        """
        ...


class OneModel:
    """Implements `ModelRoutes` for a single model service, which receives every call."""

    services = (MODEL,)

    def known_base_models(self, service: str) -> Collection[str]:
        del service
        return ()

    async def holder_of(self, base_model: str) -> str:
        del base_model
        return MODEL

    async def creator_of(self, tenant_id: str, base_model: str, adapter_id: str) -> str:
        del tenant_id, base_model, adapter_id
        return MODEL

    async def owner_of(self, tenant_id: str, adapter_id: str) -> str | None:
        del tenant_id, adapter_id
        return MODEL


class SeveralModels:
    """Implements `ModelRoutes` for several model services.

    `services` are the names in order of precedence; `runs` stores the base model of each run in the catalogue.

    Concurrency: use it from one event loop only.
    """

    def __init__(self, services: Sequence[str], *, facts: ModelFacts, runs: RunStore) -> None:
        self.table = ModelTable(services)
        self._facts = facts
        self._runs = runs
        self._base_models: OrderedDict[tuple[str, str], str] = OrderedDict()
        """Base model by tenant and adapter."""

    @property
    def services(self) -> Sequence[str]:
        return self.table.services

    async def refresh(self) -> None:
        """Request the base models of every service."""
        await asyncio.gather(*map(self._refresh_one, self.services))

    async def _refresh_one(self, service: str) -> None:
        base_models = await self._facts.base_models(service)
        for conflict in [] if base_models is None else self.table.update(service, base_models):
            _log.error(
                'two model services hold the same base model; the first is used',
                base_model=conflict.base_model,
                used=conflict.holder,
                unused=conflict.other,
            )

    def known_base_models(self, service: str) -> Collection[str]:
        return self.table.held_by(service) or ()

    async def base_models_of(self, service: str) -> Collection[str] | None:
        """Return the base models that a service is used for; None if it has never responded."""
        if self.table.held_by(service) is None:
            await self.refresh()
        return self.table.held_by(service)

    async def run_forever(
        self, *, interval_seconds: float, pause: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> Never:
        """Refresh until cancelled, because a service may be restarted with another base model."""
        while True:
            await self.refresh()
            await pause(interval_seconds)

    async def holder_of(self, base_model: str) -> str:
        if not base_model:
            return self.services[0]
        if (holder := self.table.holder_of(base_model)) is not None:
            return holder
        # A service that does not respond must not delay calls for another one.
        async with aclosing(_as_completed(map(self._refresh_one, self.services))) as results:
            async for _ in results:
                if (holder := self.table.holder_of(base_model)) is not None:
                    return holder
        if not self.table.is_complete:
            raise ServiceUnreachable(MODEL)
        raise BaseModelNotFound(base_model, self.table.names)

    async def creator_of(self, tenant_id: str, base_model: str, adapter_id: str) -> str:
        base_model = base_model_id(base_model)
        creator = await self.holder_of(base_model)
        known = await self._base_model_of(tenant_id, adapter_id) if adapter_id else ''
        # A request with the same base model may be a repetition, which the service recognizes.
        if known and known != base_model:
            raise AdapterIdTaken(adapter_id)
        return creator

    async def owner_of(self, tenant_id: str, adapter_id: str) -> str | None:
        if not adapter_id:
            return None
        if not (base_model := await self._base_model_of(tenant_id, adapter_id)):
            return await self._search(tenant_id, adapter_id)
        try:
            return await self.holder_of(base_model)
        except BaseModelNotFound as error:
            # The run exists, so its service is unreachable.
            raise ServiceUnreachable(MODEL) from error

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

    async def _search(self, tenant_id: str, adapter_id: str) -> str | None:
        """Query all services for an adapter that is not in the catalogue yet."""
        failure: DomainError | None = None
        calls = [self._has(service, tenant_id, adapter_id) for service in self.services]
        async with aclosing(_as_completed(calls)) as results:
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
