"""What quotas have to know of requests to the model service, which nobody here reads."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class QuotaRequests:
    """Reads serialized requests, and marks those that a quota forbids.

    A marked request is passed on: the model service alone knows whether it did the same before, and answers then.
    """

    is_save: Callable[[bytes], bool]
    """Whether an operation's request saves something."""
    refused_save: Callable[[bytes, int], bytes]
    """Returns such a request with the limit that has it refused, unless it is on record."""
    refused_creation: Callable[[bytes, int], bytes]
    """Returns a request for an adapter with the limit that has it refused, unless it is on record."""
