"""Predicts when each adapter's next operation arrives, from its past think times."""

from collections import OrderedDict

from services.model.domain.pace import Average

_MAX_ADAPTERS = 512
"""Maximum number of adapters with stored think times; larger than the number of adapters that share a pass."""
_SPREAD = 2.0
"""An adapter is no longer expected after this many times its mean think time."""


class ThinkTimes:
    """Think times: the time from an adapter's result to its next operation. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._mean: OrderedDict[str, Average] = OrderedDict()
        self._finish_times: dict[str, float] = {}

    def record_finish(self, adapter_id: str, now: float) -> None:
        """Record that an adapter's operation finished."""
        self._finish_times[adapter_id] = now
        self._mean.setdefault(adapter_id, Average())
        self._mean.move_to_end(adapter_id)
        if len(self._mean) > _MAX_ADAPTERS:
            oldest, _ = self._mean.popitem(last=False)
            self._finish_times.pop(oldest, None)

    def record_arrival(self, adapter_id: str, now: float) -> None:
        """Record that an adapter's next operation arrived."""
        finish_time = self._finish_times.pop(adapter_id, None)
        if finish_time is not None:
            self._mean[adapter_id].add(now - finish_time)

    def latest_expected(self, now: float, *, limit: float) -> float:
        """Return the latest expected arrival of adapters with a mean think time up to `limit`, at least `now`."""
        last = now
        for adapter_id, finish_time in self._finish_times.items():
            mean = self._mean[adapter_id].value
            if mean is not None and mean <= limit:
                last = max(last, finish_time + _SPREAD * mean)
        return last
