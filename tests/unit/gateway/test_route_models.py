"""Calls find the model service of their base model or adapter, and no answer tells of other tenants."""

import asyncio
from collections.abc import Collection
from datetime import UTC, datetime

import pytest

from fixtures.gateway_stores import MemoryRunStore
from services.gateway.catalogue.rules import Run
from services.gateway.errors import AdapterIdTaken
from services.gateway.fleet.base_models import Conflict, ModelTable
from services.gateway.fleet.model_routes import SeveralModels
from services.kit.errors import BaseModelNotFound, ServiceUnreachable

START = datetime(2026, 5, 1, tzinfo=UTC)


class Services:
    """Model services that hold `held` and have `adapters`; those in `down` refuse, those in `silent` say nothing."""

    def __init__(self, **held: set[str]) -> None:
        """Begin with no adapters, all up."""
        self.held = held
        self.adapters: dict[str, set[tuple[str, str]]] = {name: set() for name in held}
        self.down: set[str] = set()
        self.silent: set[str] = set()
        self.questions = 0

    async def base_models(self, service: str) -> Collection[str] | None:
        """Answer unless it is down."""
        await self._stay_silent(service)
        return None if service in self.down else self.held[service]

    async def has_adapter(self, service: str, tenant_id: str, adapter_id: str) -> bool:
        """Answer unless it is down."""
        self.questions += 1
        await self._stay_silent(service)
        if service in self.down:
            raise ServiceUnreachable('model')
        return (tenant_id, adapter_id) in self.adapters[service]

    async def _stay_silent(self, service: str) -> None:
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
    return SeveralModels(tuple(services.held), facts=services, runs=runs or MemoryRunStore())


async def test_base_model_is_found_where_it_is_held() -> None:
    """Each goes to its own, and an unknown one is refused with what there is."""
    routes = _routes(Services(one={'tiny'}, two={'small'}))
    assert [await routes.holder_of(name) for name in ('tiny', 'small')] == ['one', 'two']
    with pytest.raises(BaseModelNotFound) as refusal:
        await routes.holder_of('large')
    assert refusal.value.known == ('small', 'tiny')


async def test_service_that_is_away_keeps_its_base_model() -> None:
    """Its calls are not given to another one, and fail where it is."""
    services = Services(one={'tiny'}, two={'small'})
    routes = _routes(services)
    await routes.refresh()
    services.down = {'two'}
    await routes.refresh()
    assert await routes.holder_of('small') == 'two'


async def test_service_that_comes_back_with_another_base_model_is_asked_for_that_one() -> None:
    """What it held before is held by nobody."""
    services = Services(one={'tiny'}, two={'small'})
    routes = _routes(services)
    await routes.refresh()
    services.held['two'] = {'large'}
    assert await routes.holder_of('large') == 'two'
    with pytest.raises(BaseModelNotFound):
        await routes.holder_of('small')


async def test_unknown_base_model_may_be_that_of_a_service_that_was_never_reached() -> None:
    """Then nobody can say that it is not served."""
    services = Services(one={'tiny'}, two={'small'})
    services.down = {'two'}
    routes = _routes(services)
    with pytest.raises(ServiceUnreachable):
        await routes.holder_of('small')
    services.down = set()
    assert await routes.holder_of('small') == 'two'


async def test_adapter_goes_where_its_base_model_is_also_while_that_is_away() -> None:
    """The catalogue knows it, and no service is asked."""
    services, runs = Services(one={'tiny'}, two={'small'}), MemoryRunStore()
    await runs.save(_run('ad-1', 'small'))
    routes = _routes(services, runs)
    await routes.refresh()
    services.down = {'two'}
    assert await routes.owner_of('alice', 'ad-1') == 'two'
    assert services.questions == 0


async def test_id_of_an_adapter_is_not_used_for_another_base_model() -> None:
    """The same tenant's is refused; the same base model may be a repeat, and other tenants' ids are their own."""
    services, runs = Services(one={'tiny'}, two={'small'}), MemoryRunStore()
    await runs.save(_run('ad-1', 'tiny'))
    routes = _routes(services, runs)
    with pytest.raises(AdapterIdTaken):
        await routes.creator_of('alice', 'small', 'ad-1')
    assert await routes.creator_of('alice', 'tiny', 'ad-1') == 'one'
    assert await routes.creator_of('bob', 'small', 'ad-1') == 'two'
    assert await routes.creator_of('alice', 'small', '') == 'two'


async def test_adapter_is_made_while_another_service_is_away() -> None:
    """Nobody is asked for an id that the catalogue has not heard of."""
    services = Services(one={'tiny'}, two={'small'})
    routes = _routes(services)
    await routes.refresh()
    services.down = {'two'}
    assert await routes.creator_of('alice', 'tiny', 'new') == 'one'
    assert services.questions == 0


async def test_service_that_does_not_answer_holds_up_nobody() -> None:
    """A base model and an adapter are found where they are while another service is silent."""
    services = Services(one={'tiny'}, two={'small'})
    services.adapters['one'].add(('alice', 'new'))
    services.silent = {'two'}
    routes = _routes(services)
    assert await routes.holder_of('tiny') == 'one'
    assert await routes.owner_of('alice', 'new') == 'one'


async def test_new_adapter_is_found_by_asking() -> None:
    """The catalogue hears of it a moment later."""
    services = Services(one={'tiny'}, two={'small'})
    services.adapters['two'].add(('alice', 'new'))
    assert await _routes(services).owner_of('alice', 'new') == 'two'


@pytest.mark.parametrize('down', [set[str](), {'two'}], ids=['all up', 'one down'])
async def test_absent_adapters_and_those_of_others_are_not_told_apart(down: set[str]) -> None:
    """Whatever is up, both go to the same service or are refused in the same way."""
    services, runs = Services(one={'tiny'}, two={'small'}), MemoryRunStore()
    await runs.save(_run('of-bob', 'tiny', tenant_id='bob'))
    services.adapters['one'].add(('bob', 'of-bob'))
    services.down = down
    routes = _routes(services, runs)
    outcomes: list[object] = []
    for adapter_id in ('of-bob', 'absent'):
        try:
            outcomes.append(await routes.owner_of('alice', adapter_id))
        except ServiceUnreachable as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]
    assert (outcomes[0] is None) is not bool(down)


async def test_adapter_of_a_base_model_that_nobody_holds_waits_for_its_service() -> None:
    """It exists, so it is not said to be absent."""
    services, runs = Services(one={'tiny'}, two={'small'}), MemoryRunStore()
    await runs.save(_run('ad-1', 'large'))
    with pytest.raises(ServiceUnreachable):
        await _routes(services, runs).owner_of('alice', 'ad-1')


def test_first_of_two_services_has_the_base_model_and_the_conflict_is_told_once() -> None:
    """In whatever order they are heard, the configuration's order decides."""
    table = ModelTable(['one', 'two'])
    assert table.update('two', ['tiny', 'small']) == []
    assert table.update('one', ['tiny']) == [Conflict('tiny', 'one', 'two')]
    assert table.update('one', ['tiny']) == []
    assert table.holder_of('tiny') == 'one'
    assert table.held_by('two') == {'small'}
    assert table.held_by('three') is None
