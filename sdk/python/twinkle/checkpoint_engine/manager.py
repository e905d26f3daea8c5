"""Synchronizes a sampler with a trainer in the same process.

The trainers of `twinkle.model` implement `TrainedModel`, and the samplers of `twinkle.sampler` implement
`WeightReceiver`. The weights are transferred as a packed state with manifest and digest, as between services, and the
sampler verifies them before use. `twinkle_client.checkpoint_engine` has the same class for separate processes.
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
    """The part of a trainer that exports weights."""

    @property
    def base_source(self) -> BaseSource:
        """Origin of the frozen base weights."""
        ...

    def chosen_adapter(self, *, adapter_name: str | None = None) -> str:
        """Return `adapter_name` if the adapter exists, or the name of the only adapter if no name is given.

        Raises:
            UnknownAdapter: the adapter does not exist.
            NotSupportedYet: there is no adapter.
            InvalidArgument: there are several adapters, and no name is given.
        """
        ...

    def export_weights(self, *, adapter_name: str | None = None, merge_lora: bool = False) -> PackedState:
        """Copy the weights of an adapter, or of the base model with the adapter merged into it.

        A full-parameter run always exports the base model's weights.

        Raises:
            UnknownAdapter, NotSupportedYet, InvalidArgument: see `chosen_adapter`.
            UnsupportedModel: the adapter cannot be merged, or the base weights are stored in four bits.
        """
        ...

    def export_base(self) -> PackedState:
        """Copy the weights of the base model.

        Raises:
            UnsupportedModel: the base weights are stored in four bits.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class SyncedWeights:
    """The result of a sync."""

    adapter_name: str
    """Name of the weights in the sampler; empty for its base model."""
    version: int
    """Version in the version spans of tokens sampled with these weights."""
    digest: str
    """blake3 of the state, hexadecimal."""
    size_bytes: int
    """Size of the state."""
    base_size_bytes: int
    """Size of the base weights that were transferred first; 0 if the sampler already had them."""
    duration: timedelta
    """Time from the call until the sampler uses the weights."""


class CheckpointEngineManager:
    """Copies a trainer's weights to a sampler on request.

    Args:
        model: a trainer in this process.
        sampler: a sampler in this process. A sampler that shares the trainer's model can receive adapters only.
        platform: 'GPU' or 'CPU'. Both transfer the weights through host memory.
        engine: transport of the weights. None: `HostMemoryEngine`.

    Raises:
        ValueError: the platform is unknown.

    Concurrency: use the manager only in the thread that uses the trainer and the sampler.
    """

    def __init__(
        self,
        model: TrainedModel,
        sampler: WeightReceiver,
        platform: str = 'GPU',
        *,
        engine: CheckpointEngine | None = None,
    ) -> None:
        if platform not in _PLATFORMS:
            raise ValueError(f'platform must be one of {_PLATFORMS}, got {platform!r}')
        self._model = model
        self._sampler = sampler
        self._engine = engine or HostMemoryEngine()
        self._base_digest = ''

    def sync_weights(self, merge_and_sync: bool = True, *, adapter_name: str | None = None) -> SyncedWeights:  # noqa: FBT001, FBT002 - established positional parameter
        """Copy the current weights to the sampler.

        Args:
            merge_and_sync: if True, merge the adapter into the base model and replace the sampler's base weights
                with the result, in each call. If False, copy only the adapter, as a new version; the base weights
                are replaced first if they differ from the trainer's. Full-parameter training always copies all
                weights.
            adapter_name: adapter to copy. None: the only adapter.

        Returns:
            The weights that the sampler has now. A `sample` call without an adapter name uses them, unless several
            adapters were synced.

        Raises:
            DigestMismatch: the bytes changed during the transfer. The sampler keeps its previous weights.
            ValueError: the weights do not fit the sampler's model.
            SamplerBusy: requests are running on base weights that would be replaced.
            EngineFailed: the vLLM engine failed, and its weights are undefined.
            UnsupportedModel: the adapter cannot be merged, or the base weights are stored in four bits.
            UnknownAdapter: the trainer has no adapter of this name.
            NotSupportedYet, InvalidArgument: no name is given, and the trainer has no adapter or several adapters.
        """
        start_seconds = time.monotonic()
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
            duration=timedelta(seconds=time.monotonic() - start_seconds),
        )

    def _sync_base(self) -> int:
        """Copy the base weights if the sampler has different weights; return the number of copied bytes."""
        current = self._sampler.base_source
        if current == self._model.base_source or (current.digest and current.digest == self._base_digest):
            return 0
        state = self._model.export_base()
        self._engine.carry(state, self._sampler)
        self._base_digest = state.manifest.digest
        return state.manifest.size_bytes
