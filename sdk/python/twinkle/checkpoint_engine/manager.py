"""Keeps a sampler of this process in step with a trainer of this process.

Both are reached by the few verbs written down here; `twinkle.model` and `twinkle.sampler` have them. The
weights take the form that services stream: one packed state with its manifest and digest, which the
sampler checks before it uses anything. Between processes the checkpoint service does this;
`twinkle_client.checkpoint_engine` has the same name for that.
"""

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from twinkle.checkpoint_engine.base_source import BaseSource
from twinkle.checkpoint_engine.engine import CheckpointEngine, HostMemoryEngine, WeightReceiver
from twinkle.checkpoint_engine.packing import PackedState

_PLATFORMS = ('CPU', 'GPU')


class TrainedModel(Protocol):
    """What is asked of a trainer."""

    @property
    def base_source(self) -> BaseSource:
        """Where the frozen base weights come from."""
        ...

    def chosen_adapter(self, *, adapter_name: str | None = None) -> str:
        """Return the adapter that is meant: the named one, or the only one."""
        ...

    def export_weights(self, *, adapter_name: str | None = None, merge_lora: bool = False) -> PackedState:
        """Copy an adapter's weights, or the base model's with the adapter merged in."""
        ...

    def export_base(self) -> PackedState:
        """Copy the base model's own weights."""
        ...


@dataclass(frozen=True, kw_only=True)
class SyncedWeights:
    """What a sync did."""

    adapter_name: str
    """How the sampler names the weights; empty for its base model."""
    version: int
    """What tokens drawn with them carry in their version spans."""
    digest: str
    """blake3 of the state, hexadecimal."""
    size_bytes: int
    """Bytes of the state."""
    base_size_bytes: int
    """Bytes of the base weights that went before it; 0 where the sampler had them."""
    duration: timedelta
    """From the call until the sampler uses the weights."""


class CheckpointEngineManager:
    """Brings a trainer's weights into a sampler, as often as the loop asks.

    Concurrency: for the thread that drives the trainer and the sampler.
    """

    def __init__(
        self,
        model: TrainedModel,
        sampler: WeightReceiver,
        platform: str = 'GPU',
        *,
        engine: CheckpointEngine | None = None,
    ) -> None:
        """Connect a trainer and a sampler; nothing is sent yet.

        Args:
            model: a trainer of this process.
            sampler: a sampler of this process. One that shares the trainer's own model can take adapters only.
            platform: 'GPU' or 'CPU'. Weights go through host memory on either.
            engine: how weights are carried. Unset: `HostMemoryEngine`.

        Raises:
            ValueError: another platform.
        """
        if platform not in _PLATFORMS:
            raise ValueError(f'platform {platform!r} is not supported; it is one of {_PLATFORMS}')
        self._model = model
        self._sampler = sampler
        self._engine = engine or HostMemoryEngine()
        self._base_digest = ''

    def sync_weights(self, merge_and_sync: bool = True, *, adapter_name: str | None = None) -> SyncedWeights:  # noqa: FBT001, FBT002 - an established name and place
        """Have the sampler use the weights as they are now.

        Args:
            merge_and_sync: merge the adapter into the base model and replace the sampler's base weights by
                that, each time. False: replace the sampler's base weights only where they are others than
                the trainer's, and then bring the adapter alone, as a version of it. A run that trains the
                base model's own weights is brought whole in either case.
            adapter_name: may be left out while there is one adapter.

        Returns:
            What the sampler has now. A `sample` that names no adapter means these weights, unless several
            adapters were synced.

        Raises:
            DigestMismatch: the bytes changed on the way; the sampler has what it had.
            ValueError: the weights do not fit the sampler's model.
            SamplerBusy: requests run on base weights that are to be replaced.
            UnknownAdapter: the trainer has none of that name.
        """
        began = time.monotonic()
        name = self._model.chosen_adapter(adapter_name=adapter_name)
        state = self._model.export_weights(adapter_name=name, merge_lora=merge_and_sync)
        base_bytes = 0
        if state.manifest.lora_config is None:
            name = ''
        else:
            base_bytes = self._sync_base()
        version = self._engine.carry(state, self._sampler, adapter_name=name)
        return SyncedWeights(
            adapter_name=name,
            version=version,
            digest=state.manifest.digest,
            size_bytes=state.manifest.size_bytes,
            base_size_bytes=base_bytes,
            duration=timedelta(seconds=time.monotonic() - began),
        )

    def _sync_base(self) -> int:
        """Bring the base weights where the sampler has others; return how many bytes that took."""
        held = self._sampler.base_source
        if held == self._model.base_source or (held.digest and held.digest == self._base_digest):
            return 0
        state = self._model.export_base()
        self._engine.carry(state, self._sampler)
        self._base_digest = state.manifest.digest
        return state.manifest.size_bytes
