"""Rules for the number of samplers: one more if requests wait at all samplers, one fewer if fewer are enough."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from twinkle.api.sampler.v1.engine_pb2 import EngineLoad
from twinkle_client.stack.sections import suggestion

_USED_SHARE = 0.5
"""A sampler is superfluous if the other samplers need at most this fraction of their capacity for all requests."""


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Conditions under which samplers are added to or removed from a running stack. The numbers are per base model."""

    max_samplers: int
    """Maximum number of samplers. The number at the start is the minimum."""
    grow_seconds: float = 10.0
    """Time for which requests must wait at all samplers before another sampler is started."""
    shrink_seconds: float = 300.0
    """Time for which a sampler must be superfluous before it is drained."""

    def check(self, sampler_count: int) -> None:
        """Check the fields; `sampler_count` is the number of samplers at the start.

        Raises:
            ValueError: A field is invalid; the message names it.
        """
        for item in fields(self):
            value = getattr(self, item.name)
            if not isinstance(value, int if item.type is int else int | float) or isinstance(value, bool):
                raise ValueError(f'autoscaling.{item.name}: must be a number, got {value!r}')
            if not 0 < value < float('inf'):
                raise ValueError(f'autoscaling.{item.name}: must be positive, got {value!r}')
        if sampler_count < 1:
            raise ValueError('autoscaling: sampler_count must be at least 1, because requests wait at samplers')
        if self.max_samplers < sampler_count:
            text = f'must be at least sampler_count, which is {sampler_count}, got {self.max_samplers}'
            raise ValueError(f'autoscaling.max_samplers: {text}')


def scaling_of(values: Mapping[str, Any]) -> Scaling:
    """Return the section `autoscaling` of a configuration file.

    Raises:
        ValueError: A field is unknown, or `max_samplers` is missing.
    """
    known = [item.name for item in fields(Scaling)]
    for name in values:
        if name not in known:
            raise ValueError(f'autoscaling.{name}: unknown field; {suggestion(str(name), known)}')
    if 'max_samplers' not in values:
        raise ValueError('autoscaling.max_samplers: must be set')
    return Scaling(**values)


class ScalingRule:
    """Decides from the loads of a base model's samplers when their number changes."""

    def __init__(self, scaling: Scaling) -> None:
        self._scaling = scaling
        self._short_since: float | None = None
        self._ample_since: float | None = None

    def decide(self, loads: Sequence[EngineLoad], now: float) -> int:
        """Return 1 if a sampler is missing, -1 if one is superfluous, and otherwise 0.

        Args:
            loads: Load of each ready sampler. Empty while the first samplers start; the result is then 0.
            now: Seconds of a clock that does not go back.
        """
        self._short_since = _since(self._short_since, now, is_true=_is_short(loads))
        self._ample_since = _since(self._ample_since, now, is_true=_is_ample(loads))
        if self._short_since is not None and now - self._short_since >= self._scaling.grow_seconds:
            self.reset()
            return 1
        if self._ample_since is not None and now - self._ample_since >= self._scaling.shrink_seconds:
            self.reset()
            return -1
        return 0

    def reset(self) -> None:
        """Restart the measurement of both times."""
        self._short_since = self._ample_since = None


def _since(begin: float | None, now: float, *, is_true: bool) -> float | None:
    """Return the time since which a condition has been true; None if it is false."""
    if not is_true:
        return None
    return now if begin is None else begin


def _is_short(loads: Sequence[EngineLoad]) -> bool:
    """Return whether requests wait at all samplers."""
    return bool(loads) and all(load.waiting_sequence_count for load in loads)


def _is_ample(loads: Sequence[EngineLoad]) -> bool:
    """Return whether no request waits, and all samplers except the largest sampler suffice; see `_USED_SHARE`."""
    if len(loads) < 2 or any(load.waiting_sequence_count for load in loads):
        return False
    capacities = sorted(load.max_sequence_count for load in loads)
    has_slots = sum(load.running_sequence_count for load in loads) <= _USED_SHARE * sum(capacities[:-1])
    return has_slots and sum(load.kv_usage for load in loads) <= _USED_SHARE * (len(loads) - 1)
