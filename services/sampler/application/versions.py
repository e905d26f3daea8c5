"""What verbs need of the versions that are served here, whichever way a sampler comes by them."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from services.kit.caller import Caller
from services.sampler.application.following import Followers
from services.sampler.domain.adapter import AdapterChoice, AdapterKey, VersionKey
from services.sampler.domain.residency import ResidentVersion


@dataclass(frozen=True, kw_only=True)
class Retention:
    """How much is held and followed at once."""

    max_versions: int = 32
    """Versions in memory."""
    max_bytes: int = 8 << 30
    """Of their weights."""
    max_followers: int = 1024
    """Adapters whose new versions are fetched as they come."""
    idle: timedelta = timedelta(minutes=30)
    """How long an adapter is followed that nothing uses."""
    followed_run: AdapterKey | None = None
    """The full-parameter run that the sampler belongs to; it then serves nothing else, and the rest does not count."""


class Versions(Protocol):
    """The versions of one sampler."""

    @property
    def followers(self) -> Followers:
        """What is followed."""
        ...

    def start(self) -> None:
        """Begin what goes on by itself; called once, on the event loop."""
        ...

    def check_base(self) -> None:
        """Refuse a request for the base model alone where it is not served as it was loaded.

        Raises:
            BaseModelNotFound: it is not.
        """
        ...

    def lease(self, caller: Caller, choice: AdapterChoice) -> AbstractAsyncContextManager[ResidentVersion]:
        """Hold on to the version `choice` asks for; it stays within this block.

        Raises:
            NotFound, VersionNotReady, AdapterMisfit, InvalidField, NotSupportedHere: it cannot be had.
        """
        ...

    def resident(self, tenant_id: str) -> list[ResidentVersion]:
        """Return what is held for a tenant, by adapter and version."""
        ...

    def all_resident(self) -> list[ResidentVersion]:
        """Return what is held for everybody, the most recently used first."""
        ...

    def newest(self, adapter: AdapterKey) -> ResidentVersion | None:
        """Return the newest version held of an adapter."""
        ...

    def get(self, key: VersionKey) -> ResidentVersion | None:
        """Return a version if it is held."""
        ...

    def on_change(self, listener: Callable[[], None]) -> None:
        """Have `listener` called whenever what is held has changed."""
        ...

    async def unload(self, caller: Caller, adapter_id: str) -> None:
        """Drop the versions of an adapter.

        Raises:
            AdapterNotFound, NotSupportedHere: nothing of it can be dropped here.
        """
        ...

    async def close(self) -> None:
        """Stop following everything."""
        ...
