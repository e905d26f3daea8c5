"""Puts together what changes checkpoints, and the catalogue's part of the Tinker API."""

from collections.abc import Mapping, Sequence

import grpc

from services.gateway.catalogue.change_checkpoints import ChangeCheckpoints
from services.gateway.catalogue.get_run import GetRun
from services.gateway.catalogue.grpc_checkpoints import GrpcCheckpoints
from services.gateway.catalogue.sql import SqlCheckpointStore, SqlRunStore
from services.gateway.catalogue.sql_browse import SqlBrowser
from services.gateway.config import GatewayConfig
from services.gateway.forwarding.grpc_lookups import GrpcLookups
from services.gateway.http.call import Route
from services.gateway.keys.open import Accounts
from services.gateway.keys.sql import SqlProjectStore
from services.gateway.sampling.sql import SqlHandleStore
from services.gateway.sessions.assign_project import AssignProject
from services.gateway.sessions.get_session import GetSession
from services.gateway.sessions.session import Session
from services.gateway.sessions.sql import SqlSessionStore
from services.gateway.store.database import Database
from services.gateway.tinker.catalogue import CatalogueWorld, catalogue_parts
from services.gateway.tinker.links import Links
from services.gateway.tinker.router import tinker_routes
from services.gateway.tinker.session_lists import SessionListVerbs
from services.kit.clock import Clock
from services.kit.rpc.context import current_caller

Channels = Mapping[str, grpc.aio.Channel]
"""Bare ones to the services behind the gateway, by service."""


def change_checkpoints(
    config: GatewayConfig, database: Database, channels: Channels, *, clock: Clock
) -> ChangeCheckpoints:
    """Return the verbs."""
    keeper = GrpcCheckpoints(channels.get('checkpoint'), internal_token=config.internal_token)
    return ChangeCheckpoints(keeper, SqlCheckpointStore(database), caller=current_caller, clock=clock)


def catalogue_router(
    config: GatewayConfig,
    database: Database,
    checkpoints: GrpcCheckpoints,
    *,
    lookups: GrpcLookups,
    accounts: Accounts,
    clock: Clock,
) -> list[Route]:
    """Return the routes of the Tinker API for runs, checkpoints, lists of sessions and the account."""
    sessions, handles = SqlSessionStore(database), SqlHandleStore(database)
    get_session = GetSession(sessions, lifetime=config.session_lifetime, clock=clock)

    async def find_session(session_id: str) -> Session:
        return await get_session(current_caller(), session_id)

    async def sampler_ids(session_id: str) -> Sequence[str]:
        found = await handles.list_of_session(current_caller().tenant_id, session_id)
        return [handle.handle_id for handle in found]

    world = CatalogueWorld(
        browser=SqlBrowser(database),
        keeper=checkpoints,
        uploads=checkpoints,
        change=ChangeCheckpoints(checkpoints, SqlCheckpointStore(database), caller=current_caller, clock=clock),
        get_run=GetRun(SqlRunStore(database)),
        lookups=lookups,
        sessions=sessions,
        session_verbs=SessionListVerbs(
            find_session=find_session,
            sampler_ids=sampler_ids,
            assign=AssignProject(sessions, SqlProjectStore(database)),
        ),
        # A key of its own, and the same for all gateways that know the same API keys.
        links=Links(accounts.verifier.digest('key of the links to files'), clock=clock),
        revoke=accounts.keys.revoke,
    )
    return tinker_routes(catalogue_parts(world))
