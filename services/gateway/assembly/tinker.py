"""Puts the Tinker API together over what the gateway has."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.gateway.api.http.call import Route
from services.gateway.api.server_info import UpstreamFacts
from services.gateway.api.tinker.assembly import TinkerOptions, TinkerWorld, make_tinker_routes
from services.gateway.api.tinker.base_models import BaseModels
from services.gateway.api.tinker.runs import Runs
from services.gateway.api.tinker.sampler_saves import HandleSaves
from services.gateway.api.tinker.sampling_answers import sampling_answers
from services.gateway.api.tinker.sampling_routes import SamplingRoutes
from services.gateway.api.tinker.session_routes import SessionVerbs
from services.gateway.application.create_session import CreateSession
from services.gateway.application.finish_session import FinishSession
from services.gateway.application.get_session import GetSession
from services.gateway.application.heartbeat import Heartbeat
from services.gateway.application.sampling_handles import SamplingHandles
from services.gateway.assembly.futures import OpenFutures
from services.gateway.backends.grpc_lookups import GrpcLookups
from services.gateway.backends.sql import Database, SqlProjectStore, SqlRunStore, SqlSessionStore
from services.gateway.config import GatewayConfig
from services.gateway.domain.session import Session
from services.kit.clock import Clock
from services.kit.rpc.context import current_caller


@dataclass(frozen=True, kw_only=True)
class TinkerNeeds:
    """What the API stands on."""

    futures: OpenFutures
    handles: SamplingHandles
    lookups: GrpcLookups
    trainers: Sequence[UpstreamFacts]
    """What the model services say of themselves."""
    samplers: UpstreamFacts
    """What the samplers say of themselves."""
    is_rate_limited: Callable[[str], bool]
    """Whether a tenant's requests wait until it has paid for the tokens it used."""


def tinker_router(config: GatewayConfig, database: Database, needs: TinkerNeeds, *, clock: Clock) -> list[Route]:
    """Return the routes of the API."""
    sessions = SqlSessionStore(database)
    get_session = GetSession(sessions, lifetime=config.session_lifetime, clock=clock)
    lookups = needs.lookups

    async def find_session(session_id: str) -> Session:
        return await get_session(current_caller(), session_id)

    runs = Runs(needs.futures.verbs, lookups, find_session=find_session)
    return make_tinker_routes(
        TinkerWorld(
            futures=needs.futures.verbs,
            lookups=lookups,
            facts=(*needs.trainers, needs.samplers),
            sessions=SessionVerbs(
                create=CreateSession(sessions, SqlProjectStore(database), clock=clock),
                heartbeat=Heartbeat(sessions, clock=clock),
                finish=FinishSession(sessions),
            ),
            find_session=find_session,
            runs=SqlRunStore(database),
            is_rate_limited=needs.is_rate_limited,
            sampler_saves=HandleSaves(needs.handles, runs),
            parts=(_sampling(needs, runs),),
            answers=sampling_answers(needs.handles),
            flags={'sample_use_retrieve_futures': True, 'sample_join_sampling_session': True},
            options=TinkerOptions(
                body_bytes=config.tinker_body_bytes,
                tokenizers=config.tokenizers,
                is_unembed_trained=config.tinker_trains_unembed,
            ),
        )
    )


def _sampling(needs: TinkerNeeds, runs: Runs) -> SamplingRoutes:
    return SamplingRoutes(
        needs.futures.verbs,
        needs.handles,
        runs,
        samplers=BaseModels((needs.samplers,)),
        follow=needs.futures.follow,
    )
