"""Puts the Tinker API together over what the gateway has."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.gateway.catalogue.sql import SqlRunStore
from services.gateway.config import GatewayConfig
from services.gateway.forwarding.grpc_lookups import GrpcLookups
from services.gateway.forwarding.server_info import UpstreamFacts
from services.gateway.futures.wiring import OpenFutures
from services.gateway.http.call import Route
from services.gateway.keys.sql import SqlProjectStore
from services.gateway.sampling.handles import SamplingHandles
from services.gateway.sessions.create_session import CreateSession
from services.gateway.sessions.finish_session import FinishSession
from services.gateway.sessions.get_session import GetSession
from services.gateway.sessions.heartbeat import Heartbeat
from services.gateway.sessions.session import Session
from services.gateway.sessions.sql import SqlSessionStore
from services.gateway.store.database import Database
from services.gateway.tinker.assembly import TinkerOptions, TinkerWorld, make_tinker_routes
from services.gateway.tinker.base_models import BaseModels
from services.gateway.tinker.runs import Runs
from services.gateway.tinker.sampler_saves import HandleSaves
from services.gateway.tinker.sampling_answers import sampling_answers
from services.gateway.tinker.sampling_routes import SamplingRoutes
from services.gateway.tinker.session_routes import SessionVerbs
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
