"""Base models behind the gateway, as the services report them."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from twinkle.api.server.v1 import server_service_pb2
from twinkle_services.gateway.fleet.model_routes import served_name, shown_name
from twinkle_services.gateway.fleet.upstreams import ServiceFacts
from twinkle_services.kit.errors import InvalidField, ServiceUnreachable


@dataclass(frozen=True)
class BaseModel:
    """Base model with its limits; 0 if a limit is unknown."""

    name: str
    context_tokens: int
    vocabulary_size: int
    is_trainable: bool
    is_sampleable: bool
    max_lora_rank: int
    max_batch_tokens: int


class BaseModels:
    """Base models that a set of services reports."""

    def __init__(self, facts: Sequence[ServiceFacts]) -> None:
        self._facts = tuple(facts)

    async def list_all(self) -> list[BaseModel]:
        """Return the base models that can be trained or sampled now, sorted by name."""
        return _by_name(await self._describe())

    async def _describe(self) -> list[server_service_pb2.ServiceInfo]:
        return await asyncio.gather(*(fact.describe() for fact in self._facts))

    async def find(self, name: str) -> BaseModel | None:
        return next((model for model in await self.list_all() if model.name == name), None)

    async def native_name(self, name: str) -> str:
        """Return the native name of the base model that `name` matches; `name` itself unless exactly one matches."""
        return served_name(name, [model.name for model in await self.list_all()]) or name

    async def get_trainable(self, name: str) -> BaseModel:
        """Return the base model that a client names for training.

        Raises:
            InvalidField: no base model for training has this name, or several do; the error lists all names.
            ServiceUnreachable: no base model can be trained now, or a service that may have this one does not respond.
        """
        services = await self._describe()
        known = [model for model in _by_name(services) if model.is_trainable]
        is_known = served_name(name, [model.name for model in known]) is not None
        if not is_known and any(item.service == 'model' and not item.is_reachable for item in services):
            raise ServiceUnreachable('model')
        return _find_named(name, known, service='model')

    async def get_sampleable(self, name: str) -> BaseModel:
        """Return the base model that a client names for sampling.

        Raises:
            InvalidField: no base model for sampling has this name, or several do; the error lists all names.
            ServiceUnreachable: no base model can be sampled now.
        """
        known = [model for model in await self.list_all() if model.is_sampleable]
        return _find_named(name, known, service='sampler')


def _by_name(services: Sequence[server_service_pb2.ServiceInfo]) -> list[BaseModel]:
    found: dict[str, BaseModel] = {}
    for service in services:
        for info in service.base_models:
            found[info.base_model] = _merged(found.get(info.base_model), info, service)
    return [found[name] for name in sorted(found)]


def _find_named(name: str, known: Sequence[BaseModel], *, service: str) -> BaseModel:
    if not known:
        raise ServiceUnreachable(service)
    names = [model.name for model in known]
    served = served_name(name, names)
    if served is None:
        choices = ', '.join(map(shown_name, names))
        raise InvalidField('base_model', f'{name[:200]!r} is not available; choose one of {choices}')
    return known[names.index(served)]


def _merged(
    known: BaseModel | None, info: server_service_pb2.BaseModelInfo, service: server_service_pb2.ServiceInfo
) -> BaseModel:
    """Combine two reports. Use the shorter context and all capabilities; other values of `info` take precedence."""
    contexts = [tokens for tokens in (info.context_tokens, known.context_tokens if known else 0) if tokens]
    rank = service.limits.lora_rank if info.is_trainable else 0
    batch = service.limits.batch_tokens if info.is_trainable else 0
    return BaseModel(
        name=info.base_model,
        context_tokens=min(contexts, default=0),
        vocabulary_size=info.vocabulary_size or (known.vocabulary_size if known else 0),
        is_trainable=info.is_trainable or (known is not None and known.is_trainable),
        is_sampleable=info.is_sampleable or (known is not None and known.is_sampleable),
        max_lora_rank=rank or (known.max_lora_rank if known else 0),
        max_batch_tokens=batch or (known.max_batch_tokens if known else 0),
    )
