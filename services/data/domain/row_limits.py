"""Limits on the memory of rows that are being prepared: per dataset, per tenant and in total."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from twinkle_services.kit.errors import BytesFull, Cancelled, QuotaExceeded


@dataclass(frozen=True, kw_only=True)
class DecodedLimits:
    """Limits on decoded rows, that is, rows in memory."""

    rows: int
    """Maximum number of rows of a dataset."""
    dataset_bytes: int
    """Maximum size of a dataset in memory."""
    tenant_bytes: int
    """Maximum size of all rows that a tenant's requests have in memory."""
    total_bytes: int
    """Maximum size of all rows in memory."""


class DecodedBytes:
    """Counts the bytes of the rows that all requests have in memory. Concurrency: threads may share an instance."""

    def __init__(self, limits: DecodedLimits) -> None:
        self.limits = limits
        self._held: Counter[str] = Counter()
        """Bytes by tenant."""
        self.lock = threading.Lock()

    @contextmanager
    def meter(self, tenant_id: str) -> Iterator['RowMeter']:
        """Return a meter for one request; the end of the context releases all of its bytes."""
        meter = RowMeter(self, tenant_id)
        try:
            yield meter
        finally:
            meter.close()

    @property
    def held_bytes(self) -> int:
        """Number of bytes that all requests have in memory."""
        return self._held.total()

    def take(self, tenant_id: str, size_bytes: int) -> None:
        """Count bytes of a tenant; a negative number releases them. The caller holds `lock`.

        Raises:
            BytesFull: The requests in progress leave too little memory.
        """
        own, total = self._held[tenant_id] + size_bytes, self._held.total() + size_bytes
        if size_bytes > 0 and own > self.limits.tenant_bytes:
            raise BytesFull(own, self.limits.tenant_bytes)
        if size_bytes > 0 and total > self.limits.total_bytes:
            raise BytesFull(total, self.limits.total_bytes)
        self._held[tenant_id] = own
        if not own:
            del self._held[tenant_id]


class RowMeter:
    """Counts the rows of one request; implements `twinkle.dataset.RowBounds`.

    Concurrency: one thread charges at a time, and any thread may call `close`. After `close`, charges are refused, so
        that the thread of a cancelled request stops.
    """

    def __init__(self, decoded: DecodedBytes, tenant_id: str) -> None:
        self._decoded, self._tenant_id = decoded, tenant_id
        self._held_bytes = 0
        """Bytes that count for the tenant, including rows that a running step replaces."""
        self._is_closed = False
        self.size_bytes = 0
        """Size of the current rows."""
        self.row_count = 0

    def charge(self, size_bytes: int, row_count: int = 0) -> None:
        """Count bytes and rows; negative numbers release them.

        Raises:
            QuotaExceeded: The dataset would be too large.
            BytesFull: The requests in progress leave too little memory; retry later.
            Cancelled: The meter is closed.
        """
        limits = self._decoded.limits
        if row_count > 0 and self.row_count + row_count > limits.rows:
            raise QuotaExceeded('dataset_rows', limits.rows)
        if size_bytes > 0 and self.size_bytes + size_bytes > limits.dataset_bytes:
            raise QuotaExceeded('dataset_bytes', limits.dataset_bytes)
        self._hold(size_bytes)
        self.size_bytes += size_bytes
        self.row_count += row_count

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Count the rows of a step from zero, and release the replaced rows once the step is done."""
        replaced_bytes, self.size_bytes, self.row_count = self.size_bytes, 0, 0
        yield
        self._hold(-replaced_bytes)

    def close(self) -> None:
        """Release all bytes. Idempotent."""
        with self._decoded.lock:
            self._decoded.take(self._tenant_id, -self._held_bytes)
            self._held_bytes, self._is_closed = 0, True

    def _hold(self, size_bytes: int) -> None:
        with self._decoded.lock:
            if not self._is_closed:
                self._decoded.take(self._tenant_id, size_bytes)
                self._held_bytes += size_bytes
            elif size_bytes > 0:
                raise Cancelled()
