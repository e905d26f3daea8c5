"""What a tenant may use. Limits that nobody gave are None: there is no limit."""

from dataclasses import dataclass, fields
from typing import Any

BURST_SECONDS = 10
"""Seconds of its rate that a tenant may use at once, where nothing else is said."""
MIN_WEIGHT, MAX_WEIGHT = 0.01, 100.0


@dataclass(frozen=True, kw_only=True)
class Quota:
    """Limits of one tenant, or those of all that have none of their own."""

    max_adapters: int | None = None
    """At a time."""
    tokens_per_second: int | None = None
    """Trained, sampled and of prompts, together and over time."""
    burst_tokens: int | None = None
    """At once, after a pause; None: those of `BURST_SECONDS`."""
    concurrent_samples: int | None = None
    """Sampling requests under way."""
    stored_bytes: int | None = None
    """Of checkpoints."""
    weight: float | None = None
    """Part of places where several tenants wait for them; None: 1."""

    def over(self, default: 'Quota') -> 'Quota':
        """Return it with what is None taken from `default`."""
        values: dict[str, Any] = {}
        for field in fields(self):
            own = getattr(self, field.name)
            values[field.name] = getattr(default, field.name) if own is None else own
        return Quota(**values)

    @property
    def burst(self) -> float:
        """Tokens that may be used at once; without a rate it means nothing."""
        return float(self.burst_tokens or BURST_SECONDS * (self.tokens_per_second or 0))


@dataclass(frozen=True, kw_only=True)
class TenantQuota:
    """What was set for a tenant."""

    tenant_id: str
    quota: Quota
