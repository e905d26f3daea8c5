"""Handles of weights to sample from: made once, used by many requests, shared by copies of a client."""

from dataclasses import dataclass
from datetime import datetime

from services.gateway.fleet.routing import AdapterRequest


@dataclass(frozen=True, kw_only=True)
class SamplingHandle:
    """What a client samples from under a short id."""

    handle_id: str
    tenant_id: str
    session_id: str
    """The session it was made in."""
    base_model: str
    """Empty: not known yet; the adapter's."""
    checkpoint_path: str = ''
    """Our own path of saved weights; empty: none."""
    adapter_id: str = ''
    """A run that publishes the weights; empty: none. With neither, it is the base model alone."""
    future_id: str = ''
    """The future that publishes the version."""
    version: int | None = None
    """The version that was published; None: not known yet."""
    is_inflight: bool = False
    """Whether newer versions than this one are just as good; otherwise it is this one and no other."""
    clone_count: int = 0
    """How many copies of the client were counted."""
    create_time: datetime
    """UTC."""

    @property
    def is_version_due(self) -> bool:
        """Whether its version is still to be learnt."""
        return bool(self.future_id) and self.version is None

    @property
    def wish(self) -> AdapterRequest | None:
        """The weights, once their version is known; None: the base model alone."""
        if self.checkpoint_path:
            return AdapterRequest(adapter_id=self.checkpoint_path, is_checkpoint=True)
        if not self.adapter_id:
            return None
        if self.is_inflight:
            return AdapterRequest(adapter_id=self.adapter_id, at_least=self.version)
        return AdapterRequest(adapter_id=self.adapter_id, exact=self.version)

    def is_same_as(self, other: 'SamplingHandle') -> bool:
        """Say whether a repeat asks for the same weights."""
        own = (self.session_id, self.checkpoint_path, self.adapter_id, self.future_id, self.is_inflight)
        its = (other.session_id, other.checkpoint_path, other.adapter_id, other.future_id, other.is_inflight)
        is_same_base = not self.base_model or not other.base_model or self.base_model == other.base_model
        return own == its and is_same_base
