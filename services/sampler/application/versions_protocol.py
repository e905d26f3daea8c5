"""The protocol for the versions that a sampler serves: shared adapters, or a single full-parameter run."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from twinkle_services.kit.caller import Caller
from twinkle_services.sampler.application.followers import Followers
from twinkle_services.sampler.domain.adapter import AdapterChoice, AdapterKey, VersionKey
from twinkle_services.sampler.domain.residency import ResidentVersion


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Limits on resident versions and followed adapters."""

    max_versions: int = 32
    """Maximum number of resident versions."""
    max_bytes: int = 8 << 30
    """Maximum total size of the resident versions, in bytes."""
    max_followers: int = 1024
    """Maximum number of adapters whose new versions are fetched as they are published."""
    idle: timedelta = timedelta(minutes=30)
    """Time without use after which an adapter is no longer followed."""


class Versions(Protocol):
    """The versions of one sampler."""

    @property
    def followers(self) -> Followers:
        """Streams of the followed adapters."""
        ...

    def start(self) -> None:
        """Start background work; call this once, on the event loop."""
        ...

    def check_base(self) -> None:
        """Check that the engine still has the original weights of the base model.

        Raises:
            BaseModelNotFound: This sampler serves a full-parameter run instead of the base model.
        """
        ...

    def lease(self, caller: Caller, choice: AdapterChoice) -> AbstractAsyncContextManager[ResidentVersion]:
        """Keep the version that `choice` selects loaded within this block.

        An error returned by another service is raised as a `ForwardedError` with the code of the class named below.

        Raises:
            NotFound, AdapterMisfit, InvalidField, NotSupportedHere: This sampler cannot serve the version.
            VersionNotReady: The version did not arrive in time, or there was no capacity for it.
            DataLoss: The stored weights are damaged.
            Unavailable: The source of the weights cannot be reached.
        """
        ...

    def resident(self, tenant_id: str) -> list[ResidentVersion]:
        """Return a tenant's resident versions, ordered by adapter and version."""
        ...

    def all_resident(self) -> list[ResidentVersion]:
        """Return the resident versions of all tenants, most recently used first."""
        ...

    def newest(self, adapter: AdapterKey) -> ResidentVersion | None:
        """Return an adapter's newest resident version; None if it has no resident version."""
        ...

    def get(self, key: VersionKey) -> ResidentVersion | None:
        """Return a version; None if it is not resident."""
        ...

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever the set of resident versions has changed."""
        ...

    async def unload(self, caller: Caller, adapter_id: str) -> None:
        """Stop following an adapter and unload its versions. A version in use is unloaded when its last lease ends.

        Raises:
            AdapterNotFound: The adapter is not on this sampler.
            NotSupportedHere: This sampler serves only one full-parameter run.
        """
        ...

    async def close(self) -> None:
        """Stop following all adapters, and wait for running changes of the engine's weights."""
        ...
