"""The remote counterpart of the library's `CheckpointEngineManager`."""

import logging
import time
from dataclasses import dataclass
from datetime import timedelta

from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.rpc import LoopThread, remote_method
from twinkle_client.sampler import Sampler

_log = logging.getLogger('twinkle_client')
_WAIT = timedelta(minutes=1)
_PLATFORMS = ('CPU', 'GPU')


@dataclass(frozen=True, kw_only=True)
class SyncedVersion:
    """Result of a weight synchronization."""

    adapter_id: str
    version: int
    """Published version, which appears in the version spans of sampled tokens."""
    duration: timedelta
    """Time from the call until a sampler has loaded the version."""


class CheckpointEngineManager:
    """Publishes an adapter's weights and loads them into a sampler of the server.

    The server's samplers are shared, so their base weights are never replaced by merged weights. Instead, the adapter
    is loaded as a version. Together, the base weights and the version compute the same function as merged weights.

    Args:
        model: Model handle whose adapters are published.
        sampler: Sampler handle. Its requests without an adapter use the synced version from then on.
        platform: Accepted for compatibility with the library's class; the server chooses its devices.

    Raises:
        ValueError: The platform is unknown.
    """

    def __init__(self, model: MultiLoraTransformersModel, sampler: Sampler, platform: str = 'GPU') -> None:
        if platform not in _PLATFORMS:
            raise ValueError(f'platform must be one of {_PLATFORMS}, got {platform!r}')
        self._model = model
        self._sampler = sampler
        self.platform = platform

    @property
    def loop_thread(self) -> LoopThread:
        """Event loop that runs the methods."""
        return self._sampler.loop_thread

    @remote_method
    async def sync_weights(
        self,
        merge_and_sync: bool = True,  # noqa: FBT001, FBT002 - an established positional parameter
        *,
        adapter_name: str | None = None,
        dtype: str | None = None,
        wait: timedelta = _WAIT,
    ) -> SyncedVersion:
        """Publish the current weights, and return when a sampler has loaded exactly this version.

        If the server has several samplers, the sampler that the adapter's requests reach first loads the version. Other
        samplers load the version before they serve a request for it.

        Args:
            merge_and_sync: Has no effect, see the class; True writes a log line.
            adapter_name: Unset: the only adapter.
            dtype: Element type of the published weights, such as 'bfloat16'. Unset: the type of the trained weights.
            wait: Maximum time to wait for the sampler.

        Raises:
            RetryableError: The version is published, but the sampler did not load it within `wait`.
            StateError: The run trains the base model's weights, and the sampler is not configured to follow the run.
            ValueError: `dtype` is unknown.
            KeyError: No adapter has this name; or no name is given, and there is not exactly one adapter.
        """
        if merge_and_sync:
            _log.info('merge_and_sync has no effect on a shared sampler; syncing the adapter as a version')
        began = time.monotonic()
        adapter_id = self._model.adapter_id(adapter_name)
        version = await self._model.publish_version.aio(dtype=dtype, adapter_name=adapter_name)
        await self._sampler.load_adapter.aio(adapter_id, version=version, wait=wait)
        self._sampler.note_synced(adapter_id, version)
        duration = timedelta(seconds=time.monotonic() - began)
        return SyncedVersion(adapter_id=adapter_id, version=version, duration=duration)
