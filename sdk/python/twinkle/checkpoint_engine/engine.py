"""How a state gets from a trainer to a sampler: the seam, and the way within one process."""

from abc import ABC, abstractmethod
from typing import Protocol

from twinkle.checkpoint_engine.base_source import BaseSource
from twinkle.checkpoint_engine.packing import PackedState


class WeightReceiver(Protocol):
    """What is asked of a sampler."""

    @property
    def base_source(self) -> BaseSource:
        """Where the base weights it samples with come from."""
        ...

    def receive_weights(self, state: PackedState, *, adapter_name: str = '') -> int:
        """Take weights, whole and verified or not at all; return the version that tokens drawn with them carry."""
        ...


class CheckpointEngine(ABC):
    """Carries packed weights to a sampler. Subclass it for a way of your own, such as a file or a network link.

    The sampler checks what arrives by the state's manifest and digest, so that nothing carried wrongly is used.
    """

    @abstractmethod
    def carry(self, state: PackedState, receiver: WeightReceiver, *, adapter_name: str = '') -> int:
        """Have `receiver` take `state`; return the version that tokens drawn with it carry.

        Args:
            state: of an adapter or of a model; only read.
            receiver: the sampler; what its `receive_weights` raises is passed on.
            adapter_name: how the sampler is to name the weights; empty for its base model.
        """


class HostMemoryEngine(CheckpointEngine):
    """Hands over the bytes as they lie in this process's memory."""

    def carry(self, state: PackedState, receiver: WeightReceiver, *, adapter_name: str = '') -> int:
        """Have `receiver` take `state`."""
        return receiver.receive_weights(state, adapter_name=adapter_name)
