"""Wires the routes of the Tinker API."""

from itertools import chain

from twinkle_services.gateway.catalogue.checkpoints import Catalogue
from twinkle_services.gateway.catalogue.sql import SqlBrowser, SqlRunStore
from twinkle_services.gateway.config import GatewayConfig
from twinkle_services.gateway.fleet.upstreams import ServiceFacts, Upstreams
from twinkle_services.gateway.futures.open import FutureService
from twinkle_services.gateway.http.call import Route
from twinkle_services.gateway.keys.keys import Accounts
from twinkle_services.gateway.sampling.sql import SqlHandleStore
from twinkle_services.gateway.sessions.sessions import Sessions
from twinkle_services.gateway.sessions.sql import SqlSessionStore
from twinkle_services.gateway.store.database import Database
from twinkle_services.gateway.tinker.archives import ArchiveRoutes, Links, UploadRoutes
from twinkle_services.gateway.tinker.base_models import BaseModels
from twinkle_services.gateway.tinker.catalogue import CheckpointRoutes, RunRoutes
from twinkle_services.gateway.tinker.client import AccountRoutes, ClientRoutes
from twinkle_services.gateway.tinker.models import InfoRoutes, TinkerModelRoutes
from twinkle_services.gateway.tinker.results import FutureRoutes
from twinkle_services.gateway.tinker.sampling import SamplingRoutes
from twinkle_services.gateway.tinker.sessions import SessionListRoutes, SessionRoutes, SessionSearch
from twinkle_services.gateway.tinker.submission import Operations
from twinkle_services.gateway.tinker.training import TrainingRoutes
from twinkle_services.gateway.tinker.weights import WeightsRoutes
from twinkle_services.kit.clock import Clock


def open_tinker(
    config: GatewayConfig,
    database: Database,
    *,
    sessions: Sessions,
    service: FutureService,
    upstreams: Upstreams,
    samplers: ServiceFacts,
) -> list[Route]:
    """Return the routes for sessions, training, sampling and futures; `samplers` describes the models for sampling."""
    lookups, futures, handles = upstreams.lookups, service.futures, service.handles
    operations = Operations(futures, lookups, sessions)
    base_models = BaseModels((*upstreams.model_facts, samplers))
    is_unembed_trained = config.tinker_trains_unembed
    parts = (
        ClientRoutes(base_models),
        SessionRoutes(sessions, is_unembed_trained=is_unembed_trained),
        TinkerModelRoutes(operations, base_models=base_models, lookups=lookups, is_unembed_trained=is_unembed_trained),
        InfoRoutes(lookups, SqlRunStore(database), tokenizers=config.tokenizers),
        TrainingRoutes(operations, base_models, body_bytes=config.tinker_body_bytes),
        WeightsRoutes(operations, open_handle=handles.open),
        FutureRoutes(futures, handles.record_published),
        SamplingRoutes(operations, handles, samplers=BaseModels((samplers,))),
    )
    return list(chain.from_iterable(part.routes() for part in parts))


def open_tinker_catalogue(
    database: Database,
    catalogue: Catalogue,
    accounts: Accounts,
    sessions: Sessions,
    *,
    upstreams: Upstreams,
    clock: Clock,
) -> list[Route]:
    """Return the routes for runs, checkpoints, lists of sessions, and the account."""
    browser = SqlBrowser(database)
    search = SessionSearch(browser, SqlSessionStore(database), sessions)

    # Gateways with the same pepper derive the same signing key, which differs from the digests of all API keys.
    links = Links(accounts.verifier.digest('key of the links to files'), clock=clock)
    parts = (
        RunRoutes(browser, catalogue.client, runs=catalogue.runs, lookups=upstreams.lookups),
        CheckpointRoutes(catalogue.checkpoints, sessions),
        SessionListRoutes(browser, sessions, search, handles=SqlHandleStore(database)),
        ArchiveRoutes(catalogue.client, links, has_valid_key=accounts.keys.has_valid_key),
        UploadRoutes(catalogue.client, BaseModels(upstreams.model_facts)),
        AccountRoutes(browser, revoke=accounts.keys.revoke),
    )
    return list(chain.from_iterable(part.routes() for part in parts))
