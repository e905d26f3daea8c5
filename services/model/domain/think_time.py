"""When adapters that were served come back with their next work, learnt from when they did. Pure."""

from collections import OrderedDict

from services.model.domain.pace import Average

_KEPT = 512
"""Adapters remembered: more than share a pass."""
_SPREAD = 2.0
"""An adapter is given up once it is away for so many times its usual."""


class ThinkTimes:
    """Adapters by when they left and how long they usually stay away. Times are seconds of one clock."""

    def __init__(self) -> None:
        """Know no adapter."""
        self._usual: OrderedDict[str, Average] = OrderedDict()
        self._away: dict[str, float] = {}

    def record_finish(self, adapter_id: str, now: float) -> None:
        """Note that an adapter was served."""
        self._away[adapter_id] = now
        self._usual.setdefault(adapter_id, Average())
        self._usual.move_to_end(adapter_id)
        if len(self._usual) > _KEPT:
            oldest, _ = self._usual.popitem(last=False)
            self._away.pop(oldest, None)

    def record_arrival(self, adapter_id: str, now: float) -> None:
        """Note that an adapter is back."""
        left = self._away.pop(adapter_id, None)
        if left is not None:
            self._usual[adapter_id].add(now - left)

    def latest_expected(self, now: float, *, limit: float) -> float:
        """Return when the last adapter should be back of those that usually are within `limit`; `now` for none."""
        last = now
        for adapter_id, left in self._away.items():
            usual = self._usual[adapter_id].value
            if usual is not None and usual <= limit:
                last = max(last, left + _SPREAD * usual)
        return last
