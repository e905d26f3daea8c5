"""Puts the Tinker API together."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from services.gateway.catalogue.ports import RunStore
from services.gateway.forwarding.server_info import UpstreamFacts
from services.gateway.futures.ports import Futures
from services.gateway.http.call import Route
from services.gateway.tinker.base_models import BaseModels
from services.gateway.tinker.client_routes import ClientRoutes
from services.gateway.tinker.future_routes import AnswerOf, FutureRoutes
from services.gateway.tinker.info_routes import InfoRoutes
from services.gateway.tinker.model_routes import ModelRoutes
from services.gateway.tinker.operations import Operations
from services.gateway.tinker.ports import FindSession, Lookups, SamplerSaves
from services.gateway.tinker.router import Part, tinker_routes
from services.gateway.tinker.runs import Runs
from services.gateway.tinker.session_routes import SessionRoutes, SessionVerbs
from services.gateway.tinker.training_answers import training_answers
from services.gateway.tinker.training_routes import TrainingRoutes
from services.gateway.tinker.weights_routes import WeightsRoutes

_UNEMBED_NOTICE = 'train_unembed has no effect on this server: the output head stays as it is in the base model'


@dataclass(frozen=True, kw_only=True)
class TinkerOptions:
    """What an operator decides."""

    body_bytes: int
    """Most bytes of a batch of examples, sent or decompressed."""
    tokenizers: Mapping[str, str] = field(default_factory=dict[str, str])
    """Where clients find the tokenizers of base models, where that is not under their own names."""
    is_unembed_trained: bool = False
    """Whether `train_unembed` adds an adapter to the output head."""


@dataclass(frozen=True, kw_only=True)
class TinkerWorld:
    """What the API works with."""

    futures: Futures
    lookups: Lookups
    facts: Sequence[UpstreamFacts]
    """What the services behind the gateway say of themselves."""
    sessions: SessionVerbs
    find_session: FindSession
    runs: RunStore
    sampler_saves: SamplerSaves
    options: TinkerOptions
    is_rate_limited: Callable[[str], bool] = lambda _: False
    """Whether a tenant's requests wait until it has paid for the tokens it used."""
    parts: Iterable[Part] = ()
    """Routes of other resources: sampling, the catalogue."""
    answers: Mapping[str, AnswerOf] = field(default_factory=dict[str, AnswerOf])
    """What makes the answers of their futures."""
    flags: Mapping[str, bool] = field(default_factory=dict[str, bool])
    """Flags of the clients' configuration for what they serve."""


def make_tinker_routes(world: TinkerWorld) -> list[Route]:
    """Return all routes of the API."""
    base_models = BaseModels(world.facts)
    runs = Runs(world.futures, world.lookups, find_session=world.find_session)
    operations = Operations(world.futures, runs)
    return tinker_routes(
        (
            ClientRoutes(base_models, flags=dict(world.flags)),
            SessionRoutes(world.sessions, notice='' if world.options.is_unembed_trained else _UNEMBED_NOTICE),
            ModelRoutes(
                world.futures,
                runs,
                operations,
                base_models=base_models,
                lookups=world.lookups,
                is_unembed_trained=world.options.is_unembed_trained,
            ),
            InfoRoutes(world.lookups, world.runs, tokenizers=world.options.tokenizers),
            TrainingRoutes(operations, runs, base_models, body_bytes=world.options.body_bytes),
            WeightsRoutes(operations, world.sampler_saves),
            FutureRoutes(world.futures, {**training_answers(), **world.answers}, is_rate_limited=world.is_rate_limited),
            *world.parts,
        )
    )
