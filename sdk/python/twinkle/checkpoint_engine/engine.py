"""The interface that transfers a state from a trainer to a sampler, and its implementation for a single process."""

from abc import ABC, abstractmethod
from typing import Protocol

from twinkle.checkpoint_engine.base_source import BaseSource
from twinkle.checkpoint_engine.packing import PackedState


class WeightReceiver(Protocol):
    """The part of a sampler that receives weights."""

    @property
    def base_source(self) -> BaseSource:
        """Origin of the sampler's base weights."""
        ...

    def receive_weights(self, state: PackedState, *, adapter_name: str = '') -> int:
        """Verify and load weights; return the version that is reported for tokens sampled with them.

        `adapter_name` is empty for the state of a model. A failed call leaves the sampler's weights unchanged, unless
        it raises `EngineFailed`.

        Raises:
            DigestMismatch, ValueError, SamplerBusy, EngineFailed: see `twinkle.sampler.Sampler.receive_weights`.
        """
        ...


class CheckpointEngine(ABC):
    """Transfers packed weights to a sampler. Subclass the class for another transport, such as a file or a socket.

    The sampler verifies the received state by its manifest and digest, so corrupt data is never used.
    """

    @abstractmethod
    def carry(self, state: PackedState, receiver: WeightReceiver, *, adapter_name: str = '') -> int:
        """Transfer `state` to `receiver`; return the version that is reported for tokens sampled with it.

        Args:
            state: state of an adapter or of a model; read-only.
            receiver: the sampler. Errors of its `receive_weights` propagate.
            adapter_name: name of the weights in the sampler; empty for its base model.
        """


class HostMemoryEngine(CheckpointEngine):
    """Passes the state to a sampler in the same process, without copying."""

    def carry(self, state: PackedState, receiver: WeightReceiver, *, adapter_name: str = '') -> int:
        """Pass `state` to `receiver`."""
        return receiver.receive_weights(state, adapter_name=adapter_name)
