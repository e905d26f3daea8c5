"""Lookup of the base models that Tinker clients name, with reachable and with unreachable services."""

import pytest

from fixtures.tinker_api import FixedFacts
from twinkle.api.server.v1 import server_service_pb2
from twinkle_services.gateway.tinker.base_models import BaseModels
from twinkle_services.kit.errors import InvalidField, ServiceUnreachable


def _facts(service: str, *names: str) -> FixedFacts:
    """Return the facts of a service with these base models; a service without any is unreachable."""
    info = server_service_pb2.ServiceInfo(service=service, is_reachable=bool(names))
    for name in names:
        info.base_models.add(base_model=name, is_trainable=service == 'model', is_sampleable=service == 'sampler')
    return FixedFacts(info)


async def test_unknown_name_is_refused_only_if_all_model_services_respond() -> None:
    """An unknown name is a temporary error while a model service is unreachable, and is refused otherwise."""
    silent = BaseModels([_facts('model', 'a'), _facts('model'), _facts('sampler', 'a', 'b')])
    assert (await silent.get_trainable('a')).name == 'a'
    with pytest.raises(ServiceUnreachable):
        await silent.get_trainable('b')
    complete = BaseModels([_facts('model', 'a'), _facts('model', 'b'), _facts('sampler')])
    assert (await complete.get_trainable('b')).name == 'b'
    with pytest.raises(InvalidField):
        await complete.get_trainable('c')


async def test_no_name_is_refused_without_services() -> None:
    """Every name is a temporary error if no model service and no sampler responds."""
    models = BaseModels([_facts('model'), _facts('sampler')])
    with pytest.raises(ServiceUnreachable):
        await models.get_trainable('a')
    with pytest.raises(ServiceUnreachable):
        await models.get_sampleable('a')
