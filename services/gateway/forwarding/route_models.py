"""The verbs that find the model service of a call: by its base model, or by its adapter.

The base model of an adapter never changes, so what was found once is remembered. Nothing here says whether an
adapter exists: that is for its service, which refuses absent ones and those of other tenants alike.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import aclosing
from typing import Any, Never, TypeVar

import structlog

from services.gateway.catalogue.ports import RunStore
from services.gateway.errors import AdapterIdTaken
from services.gateway.forwarding.base_models import ModelTable
from services.gateway.forwarding.ports import ModelFacts
from services.kit.errors import BaseModelNotFound, DomainError, ServiceUnreachable

MODEL = 'model'
"""The name of the only model service, and the word for any of them in an error."""
_REMEMBERED = 1 << 16

Answer = TypeVar('Answer')

_log = structlog.get_logger('models')


class OneModel:
    """Implements `ports.ModelRoutes` where there is one model service: everything goes there."""

    services = (MODEL,)

    def known_base_models(self, service: str) -> Collection[str]:
        """Return nothing: the service is asked."""
        del service
        return ()

    async def holder_of(self, base_model: str) -> str:
        """Return the service, which says itself what it holds."""
        del base_model
        return MODEL

    async def maker_of(self, tenant_id: str, base_model: str, adapter_id: str) -> str:
        """Return the service, which knows itself what ids were used."""
        del tenant_id, base_model, adapter_id
        return MODEL

    async def owner_of(self, tenant_id: str, adapter_id: str) -> str | None:
        """Return the service, which says itself whether it has the adapter."""
        del tenant_id, adapter_id
        return MODEL


class RouteModels:
    """Implements `ports.ModelRoutes` for several model services.

    Concurrency: all verbs from the event loop.
    """

    def __init__(self, services: Sequence[str], *, facts: ModelFacts, runs: RunStore) -> None:
        """Know nothing yet.

        Args:
            services: names of the model services; of two with one base model the first one has it.
            facts: asks them.
            runs: remembers the base model of every run that was ever heard of.
        """
        self.table = ModelTable(services)
        self._facts = facts
        self._runs = runs
        self._bases: OrderedDict[tuple[str, str], str] = OrderedDict()

    @property
    def services(self) -> Sequence[str]:
        """Names of the model services."""
        return self.table.services

    async def learn(self) -> None:
        """Ask every service what it holds."""
        await asyncio.gather(*map(self._ask, self.services))

    async def _ask(self, service: str) -> None:
        base_models = await self._facts.base_models(service)
        for conflict in [] if base_models is None else self.table.hear(service, base_models):
            _log.error(
                'two model services hold one base model; the first is used',
                base_model=conflict.base_model,
                used=conflict.holder,
                unused=conflict.other,
            )

    def known_base_models(self, service: str) -> Collection[str]:
        """Return what a service holds, as it said last; nothing where it never did."""
        return self.table.held_by(service) or ()

    async def base_models_of(self, service: str) -> Collection[str] | None:
        """Return the base models for which a service is asked; None where it cannot be asked what it holds."""
        if self.table.held_by(service) is None:
            await self.learn()
        return self.table.held_by(service)

    async def keep_learning(
        self, *, interval_seconds: float, pause: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> Never:
        """Ask again and again, until cancelled: a service may be restarted with another base model."""
        while True:
            await self.learn()
            await pause(interval_seconds)

    async def holder_of(self, base_model: str) -> str:
        """Return the service that holds a base model; see the port."""
        if not base_model:
            return self.services[0]
        if (holder := self.table.holder_of(base_model)) is not None:
            return holder
        # One that does not answer does not hold up the call for another one.
        async with aclosing(_as_they_come(map(self._ask, self.services))) as answers:
            async for _ in answers:
                if (holder := self.table.holder_of(base_model)) is not None:
                    return holder
        if not self.table.is_complete:
            raise ServiceUnreachable(MODEL)
        raise BaseModelNotFound(base_model, self.table.names)

    async def maker_of(self, tenant_id: str, base_model: str, adapter_id: str) -> str:
        """Return the service that is to make an adapter; see the port."""
        maker = await self.holder_of(base_model)
        known = await self._base_of(tenant_id, adapter_id) if adapter_id else ''
        # With the same base model it may be a repeat: its service knows.
        if known and known != base_model:
            raise AdapterIdTaken(adapter_id)
        return maker

    async def owner_of(self, tenant_id: str, adapter_id: str) -> str | None:
        """Return the service that has a tenant's adapter; see the port."""
        if not adapter_id:
            return None
        if base_model := await self._base_of(tenant_id, adapter_id):
            return await self._known_holder_of(base_model)
        return await self._find(tenant_id, adapter_id)

    async def _base_of(self, tenant_id: str, adapter_id: str) -> str:
        """Return the base model of an adapter as the catalogue knows it; empty where it does not."""
        key = (tenant_id, adapter_id)
        if key not in self._bases:
            run = await self._runs.get(tenant_id, adapter_id)
            if run is None or not run.base_model:
                return ''
            self._bases[key] = run.base_model
            if len(self._bases) > _REMEMBERED:
                self._bases.popitem(last=False)
        return self._bases[key]

    async def _known_holder_of(self, base_model: str) -> str:
        """Return who holds the base model of a run: where nobody does any more, its service is away."""
        try:
            return await self.holder_of(base_model)
        except BaseModelNotFound as error:
            raise ServiceUnreachable(MODEL) from error

    async def _find(self, tenant_id: str, adapter_id: str) -> str | None:
        """Ask all services for an adapter that the catalogue has not heard of: it may be new."""
        failure: DomainError | None = None
        calls = [self._has(service, tenant_id, adapter_id) for service in self.services]
        async with aclosing(_as_they_come(calls)) as answers:
            async for answer in answers:
                if isinstance(answer, str):
                    return answer
                failure = answer or failure
        if failure is not None:
            raise ServiceUnreachable(MODEL) from failure
        return None

    async def _has(self, service: str, tenant_id: str, adapter_id: str) -> str | DomainError | None:
        """Return the service where it has an adapter, None where it has not, and why it cannot say."""
        try:
            return service if await self._facts.has_adapter(service, tenant_id, adapter_id) else None
        except DomainError as error:
            return error


async def _as_they_come(calls: Iterable[Coroutine[Any, Any, Answer]]) -> AsyncGenerator[Answer, None]:
    """Yield the answers of calls that are made at the same time; those not needed any more are given up."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        for answer in asyncio.as_completed(tasks):
            yield await answer
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
