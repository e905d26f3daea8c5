"""What becomes of a request whose sampler failed: which errors another sampler may cure. Data and rules only."""

from dataclasses import dataclass, field
from enum import Enum

from services.gateway.errors import ReplicaNotReached
from services.gateway.fleet.routing import RouteKey
from services.kit.errors import Code, DomainError

MOST_BAD_ENDS = 3
"""Samplers in a row that a request may break before it gets further by a token: it may be the request's doing."""
_REFUSALS = frozenset({'ENGINE_PAUSED', 'QUEUE_FULL'})
"""The sampler is well and does not want it now; another one may."""
_UNSETTLED = frozenset({'ID_TAKEN', 'VERSION_NOT_READY'})
"""Of a request that goes on elsewhere: its beginnings there, or its version, take a moment."""


class Verdict(Enum):
    """What an error means for the request."""

    FINAL = 'final'
    """It is the caller's to hear."""
    REFUSED = 'refused'
    """Another sampler may take it; where none does, the caller hears the refusal."""
    BROKEN = 'broken'
    """The sampler ended while it had the request."""
    UNREACHED = 'unreached'
    """The sampler never had the request."""


@dataclass(kw_only=True)
class Attempt:
    """A request on its way through the fleet."""

    key: RouteKey
    tenant_id: str = ''
    """Whose request it is."""
    deadline: float | None = None
    """On the event loop's clock; None: the caller waits as long as it takes."""
    tried: set[str] = field(default_factory=set[str])
    """Replicas that failed since the last time there was hope."""
    is_begun: bool = False
    """Whether part of the answer was delivered: then it is worth waiting longer for a replica."""
    has_tokens: bool = False
    """Whether a token was among it."""
    bad_ends: int = 0
    """Samplers in a row that broke with it, without a token between."""
    refusal: DomainError | None = None
    """How the last replica refused it; None where it failed otherwise."""
    wait_count: int = 0
    """How often it waited for a replica since it got further."""
    is_answering: bool = False
    """Whether the replica that has it now brought tokens."""
    give_up_at: float | None = None
    """Until when it waits for one, on the event loop's clock; None: it does not wait."""

    @property
    def is_bound(self) -> bool:
        """Whether only the replica that began the answer can go on with it."""
        return self.has_tokens and self.key.adapter is not None and self.key.adapter.is_checkpoint

    def begin(self) -> None:
        """Take it that there is something to lose: the longer patience with it counts from now."""
        if not self.is_begun:
            self.is_begun, self.give_up_at = True, None

    def went_on(self, *, has_tokens: bool) -> None:
        """Take note that a replica answers, with a token or something else."""
        self.begin()
        if has_tokens:
            self.is_answering = self.has_tokens = True
            self.tried.clear()
            self.bad_ends, self.wait_count, self.give_up_at = 0, 0, None


def verdict_on(error: DomainError, *, is_begun: bool) -> Verdict:
    """Return what a sampler's error means.

    Args:
        error: its own, or ServiceUnreachable where the connection failed.
        is_begun: whether part of the answer was delivered.
    """
    if isinstance(error, ReplicaNotReached):
        return Verdict.UNREACHED
    if error.reason == 'SERVICE_UNREACHABLE':
        return Verdict.BROKEN
    if error.reason in _REFUSALS or (is_begun and error.reason in _UNSETTLED):
        return Verdict.REFUSED
    if error.reason == 'DRAINING':
        return Verdict.REFUSED
    if error.code in {Code.INTERNAL, Code.CANCELLED, Code.UNKNOWN}:
        return Verdict.BROKEN
    return Verdict.FINAL
