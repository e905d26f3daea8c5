"""Puts the catalogue's part of the Tinker API together."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from services.gateway.api.tinker.account_routes import AccountRoutes
from services.gateway.api.tinker.archive_routes import ArchiveRoutes
from services.gateway.api.tinker.catalogue_ports import Browser, Keeper, Uploads
from services.gateway.api.tinker.checkpoint_routes import CheckpointRoutes
from services.gateway.api.tinker.links import Links
from services.gateway.api.tinker.ports import Lookups
from services.gateway.api.tinker.router import Part
from services.gateway.api.tinker.run_routes import RunRoutes
from services.gateway.api.tinker.session_lists import SessionListRoutes, SessionListVerbs
from services.gateway.api.tinker.upload_routes import UploadRoutes
from services.gateway.application.change_checkpoints import ChangeCheckpoints
from services.gateway.application.copy_checkpoint import CopyCheckpoint
from services.gateway.application.get_run import GetRun
from services.gateway.ports import SessionStore


@dataclass(frozen=True, kw_only=True)
class CatalogueWorld:
    """What these routes work with."""

    browser: Browser
    keeper: Keeper
    uploads: Uploads
    change: ChangeCheckpoints
    get_run: GetRun
    lookups: Lookups
    sessions: SessionStore
    session_verbs: SessionListVerbs
    links: Links
    revoke: Callable[[str], Awaitable[object]]
    """Makes a key worthless, by its id."""


def catalogue_parts(world: CatalogueWorld) -> list[Part]:
    """Return the parts."""
    return [
        RunRoutes(world.browser, world.keeper, get_run=world.get_run, lookups=world.lookups),
        CheckpointRoutes(world.change, CopyCheckpoint(world.keeper), find_session=world.session_verbs.find_session),
        SessionListRoutes(world.browser, world.sessions, world.session_verbs),
        ArchiveRoutes(world.keeper, world.links),
        UploadRoutes(world.uploads),
        AccountRoutes(world.browser, revoke=world.revoke),
    ]
