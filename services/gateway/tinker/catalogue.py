"""Puts the catalogue's part of the Tinker API together."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from services.gateway.catalogue.change_checkpoints import ChangeCheckpoints
from services.gateway.catalogue.copy_checkpoint import CopyCheckpoint
from services.gateway.catalogue.get_run import GetRun
from services.gateway.sessions.ports import SessionStore
from services.gateway.tinker.account_routes import AccountRoutes
from services.gateway.tinker.archive_routes import ArchiveRoutes
from services.gateway.tinker.catalogue_ports import Browser, Keeper, Uploads
from services.gateway.tinker.checkpoint_routes import CheckpointRoutes
from services.gateway.tinker.links import Links
from services.gateway.tinker.ports import Lookups
from services.gateway.tinker.router import Part
from services.gateway.tinker.run_routes import RunRoutes
from services.gateway.tinker.session_lists import SessionListRoutes, SessionListVerbs
from services.gateway.tinker.upload_routes import UploadRoutes


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
