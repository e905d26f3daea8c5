"""The library's name for keeping a sampler in step with a trainer, where both are the server's."""

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
    """What a sync did."""

    adapter_id: str
    version: int
    """What tokens drawn with these weights carry in their version spans."""
    duration: timedelta
    """From the call until the sampler has the version."""


class CheckpointEngineManager:
    """Publishes an adapter's weights and has the sampler ready for them.

    A sampler of the server is shared, so its base weights are never replaced for one of those who use it:
    the adapter travels as a version of its own, which computes what merged weights would.
    """

    def __init__(self, model: MultiLoraTransformersModel, sampler: Sampler, platform: str = 'GPU') -> None:
        """Connect two handles; nothing is sent yet.

        Args:
            model: whose adapters are published.
            sampler: a request to it that names no adapter means what was synced last.
            platform: as of the library's class; the server decides where it computes.

        Raises:
            ValueError: another platform.
        """
        if platform not in _PLATFORMS:
            raise ValueError(f'platform {platform!r} is not supported; it is one of {_PLATFORMS}')
        self._model = model
        self._sampler = sampler
        self.platform = platform

    @property
    def loop_thread(self) -> LoopThread:
        """Where its coroutines run."""
        return self._sampler.loop_thread

    @remote_method
    async def sync_weights(
        self,
        merge_and_sync: bool = True,  # noqa: FBT001, FBT002 - an established name and place
        *,
        adapter_name: str | None = None,
        dtype: str | None = None,
        wait: timedelta = _WAIT,
    ) -> SyncedVersion:
        """Publish the weights as they are now, and return once the sampler has exactly this version.

        Args:
            merge_and_sync: makes no difference here, see the class; where it is true the log says so.
            adapter_name: unset: the only adapter.
            dtype: element type of the published weights, such as 'bfloat16'. Unset: the trainer's own.
            wait: how long the sampler may take for it.

        Raises:
            RetryableError: the version is published, and the sampler does not have it within `wait`.
            StateError: the run trains the base model's own weights, and this sampler does not follow it.
            KeyError: there is no adapter of that name.
        """
        if merge_and_sync:
            _log.info('a shared sampler keeps its base weights: the adapter is synced as a version of its own')
        began = time.monotonic()
        adapter_id = self._model.adapter_id(adapter_name)
        version = await self._model.publish_version.aio(dtype=dtype, adapter_name=adapter_name)
        await self._sampler.load_adapter.aio(adapter_id, version=version, wait=wait)
        self._sampler.note_synced(adapter_id, version)
        duration = timedelta(seconds=time.monotonic() - began)
        return SyncedVersion(adapter_id=adapter_id, version=version, duration=duration)
