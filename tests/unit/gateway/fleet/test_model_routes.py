"""Routing of calls to the model service of their base model or adapter, without revealing other tenants' adapters."""

import asyncio
from collections.abc import Collection
from datetime import UTC, datetime

import pytest

from fixtures.gateway_stores import MemoryRunStore
from services.gateway.catalogue.rules import Run
from services.gateway.errors import AdapterIdTaken
from services.gateway.fleet.model_routes import Conflict, ModelTable, SeveralModels
from services.kit.errors import BaseModelNotFound, ServiceUnreachable

START = datetime(2026, 5, 1, tzinfo=UTC)


class Services:
    """Fake model services with their base models and adapters.

    A service in `down` is unreachable, and a service in `silent` never responds.
    """

    def __init__(self, **served_models: set[str]) -> None:
        self.served_models = served_models
        self.adapters: dict[str, set[tuple[str, str]]] = {name: set() for name in served_models}
        self.down: set[str] = set()
        self.silent: set[str] = set()
        self.lookup_count = 0

    async def base_models(self, service: str) -> Collection[str] | None:
        """Return the base models of a service, or None while it is down."""
        await self._wait_if_silent(service)
        return None if service in self.down else self.served_models[service]

    async def has_adapter(self, service: str, tenant_id: str, adapter_id: str) -> bool:
        self.lookup_count += 1
        await self._wait_if_silent(service)
        if service in self.down:
            raise ServiceUnreachable('model')
        return (tenant_id, adapter_id) in self.adapters[service]

    async def _wait_if_silent(self, service: str) -> None:
        if service in self.silent:
            await asyncio.Event().wait()


def _run(run_id: str, base_model: str, *, tenant_id: str = 'alice') -> Run:
    return Run(
        run_id=run_id,
        tenant_id=tenant_id,
        base_model=base_model,
        lora_rank=8,
        step_count=0,
        version=0,
        is_active=True,
        create_time=START,
        update_time=START,
    )


def _routes(services: Services, runs: MemoryRunStore | None = None) -> SeveralModels:
    return SeveralModels(tuple(services.served_models), facts=services, runs=runs or MemoryRunStore())


async def test_base_model_is_routed_to_its_model_service() -> None:
    """A base model is routed to the service that holds it; the error for an unknown base model lists the known ones."""
    routes = _routes(Services(one={'tiny'}, two={'small'}))
    assert [await routes.holder_of(name) for name in ('tiny', 'small')] == ['one', 'two']
    with pytest.raises(BaseModelNotFound) as refusal:
        await routes.holder_of('large')
    assert refusal.value.known == ('small', 'tiny')


async def test_unreachable_service_keeps_its_base_model() -> None:
    """Calls for a base model are not routed to another service while its own service is unreachable."""
    services = Services(one={'tiny'}, two={'small'})
    routes = _routes(services)
    await routes.refresh()
    services.down = {'two'}
    await routes.refresh()
    assert await routes.holder_of('small') == 'two'


async def test_service_that_changes_its_base_model_is_routed_by_the_new_one() -> None:
    """A service that changes its base model receives calls for the new one; the previous base model is unknown."""
    services = Services(one={'tiny'}, two={'small'})
    routes = _routes(services)
    await routes.refresh()
    services.served_models['two'] = {'large'}
    assert await routes.holder_of('large') == 'two'
    with pytest.raises(BaseModelNotFound):
        await routes.holder_of('small')


async def test_unknown_base_model_is_not_denied_before_all_services_responded() -> None:
    """An unknown base model raises ServiceUnreachable, because a service that was never reached may hold it."""
    services = Services(one={'tiny'}, two={'small'})
    services.down = {'two'}
    routes = _routes(services)
    with pytest.raises(ServiceUnreachable):
        await routes.holder_of('small')
    services.down = set()
    assert await routes.holder_of('small') == 'two'


async def test_adapter_in_the_catalogue_is_routed_to_an_unreachable_service() -> None:
    """An adapter in the catalogue is routed by its base model, so no service is queried."""
    services, runs = Services(one={'tiny'}, two={'small'}), MemoryRunStore()
    await runs.save(_run('ad-1', 'small'))
    routes = _routes(services, runs)
    await routes.refresh()
    services.down = {'two'}
    assert await routes.owner_of('alice', 'ad-1') == 'two'
    assert services.lookup_count == 0


async def test_adapter_id_cannot_be_reused_for_another_base_model() -> None:
    """An adapter id is refused only for another base model of the same tenant."""
    services, runs = Services(one={'tiny'}, two={'small'}), MemoryRunStore()
    await runs.save(_run('ad-1', 'tiny'))
    routes = _routes(services, runs)
    with pytest.raises(AdapterIdTaken):
        await routes.creator_of('alice', 'small', 'ad-1')
    assert await routes.creator_of('alice', 'tiny', 'ad-1') == 'one'
    assert await routes.creator_of('bob', 'small', 'ad-1') == 'two'
    assert await routes.creator_of('alice', 'small', '') == 'two'


async def test_adapter_is_created_while_another_service_is_unreachable() -> None:
    """Creating an adapter whose id is not in the catalogue queries no service."""
    services = Services(one={'tiny'}, two={'small'})
    routes = _routes(services)
    await routes.refresh()
    services.down = {'two'}
    assert await routes.creator_of('alice', 'tiny', 'new') == 'one'
    assert services.lookup_count == 0


async def test_silent_service_delays_no_other_service() -> None:
    """A base model and an adapter of one service are found while another service does not respond."""
    services = Services(one={'tiny'}, two={'small'})
    services.adapters['one'].add(('alice', 'new'))
    services.silent = {'two'}
    routes = _routes(services)
    assert await routes.holder_of('tiny') == 'one'
    assert await routes.owner_of('alice', 'new') == 'one'


async def test_new_adapter_is_found_by_querying_the_services() -> None:
    """An adapter that is not yet in the catalogue is found because the services are queried."""
    services = Services(one={'tiny'}, two={'small'})
    services.adapters['two'].add(('alice', 'new'))
    assert await _routes(services).owner_of('alice', 'new') == 'two'


@pytest.mark.parametrize('down', [set[str](), {'two'}], ids=['all up', 'one down'])
async def test_absent_adapters_and_adapters_of_other_tenants_are_indistinguishable(down: set[str]) -> None:
    """An absent adapter and an adapter of another tenant have the same outcome, with all services up or one down."""
    services, runs = Services(one={'tiny'}, two={'small'}), MemoryRunStore()
    await runs.save(_run('ad-bob', 'tiny', tenant_id='bob'))
    services.adapters['one'].add(('bob', 'ad-bob'))
    services.down = down
    routes = _routes(services, runs)
    outcomes: list[object] = []
    for adapter_id in ('ad-bob', 'absent'):
        try:
            outcomes.append(await routes.owner_of('alice', adapter_id))
        except ServiceUnreachable as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]
    assert (outcomes[0] is None) is not bool(down)


async def test_adapter_of_an_unserved_base_model_is_not_reported_absent() -> None:
    """An adapter in the catalogue whose base model no service holds raises ServiceUnreachable."""
    services, runs = Services(one={'tiny'}, two={'small'}), MemoryRunStore()
    await runs.save(_run('ad-1', 'large'))
    with pytest.raises(ServiceUnreachable):
        await _routes(services, runs).owner_of('alice', 'ad-1')


def test_first_configured_service_keeps_the_base_model_on_a_conflict() -> None:
    """The first configured service keeps a base model that two services hold, and the conflict is reported once."""
    table = ModelTable(['one', 'two'])
    assert table.update('two', ['tiny', 'small']) == []
    assert table.update('one', ['tiny']) == [Conflict('tiny', 'one', 'two')]
    assert table.update('one', ['tiny']) == []
    assert table.holder_of('tiny') == 'one'
    assert table.held_by('two') == {'small'}
    assert table.held_by('three') is None
