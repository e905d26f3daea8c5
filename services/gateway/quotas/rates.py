"""Tokens in a second: who owes some waits a little, or is refused until it is paid."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta

from services.gateway.quotas.book import QuotaBook
from services.gateway.quotas.token_bucket import TokenBucket
from services.kit.clock import Clock
from services.kit.errors import QuotaExceeded

NAME = 'tokens_per_second'
_SHORTEST_SECONDS = 0.01
_LONGEST_SECONDS = 1.0
"""Between two looks: a quota may be changed meanwhile."""


class TokenRates:
    """Keeps an account for each tenant that has a rate. Of this gateway alone, and from its start."""

    def __init__(
        self, book: QuotaBook, *, clock: Clock, pause: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        """Hold tenants to what `book` says; `pause` waits for some seconds."""
        self._book = book
        self._clock = clock
        self._pause = pause
        self._accounts: dict[str, tuple[float, float, TokenBucket]] = {}
        """Rate, burst and account."""

    def charge(self, tenant_id: str, count: int) -> None:
        """Take tokens that were used from a tenant's account; one without a rate has none."""
        account = self._account(tenant_id)
        if account is not None and count:
            account.charge(count, now=self._clock.monotonic())

    def seconds_until_free(self, tenant_id: str) -> float:
        """Return how long a tenant still pays for what it used; 0.0 where it owes nothing."""
        account = self._account(tenant_id)
        return 0.0 if account is None else account.seconds_until_free(now=self._clock.monotonic())

    def is_owing(self, tenant_id: str) -> bool:
        """Whether a tenant still pays for what it used."""
        return self.seconds_until_free(tenant_id) > 0

    def check(self, tenant_id: str) -> None:
        """Let work in of a tenant that owes nothing.

        Raises:
            QuotaExceeded: it does; with the time until it is paid.
        """
        seconds = self.seconds_until_free(tenant_id)
        if seconds > 0:
            limit = self._book.of(tenant_id).tokens_per_second or 0
            raise QuotaExceeded(NAME, limit, timedelta(seconds=seconds))

    async def enter(self, tenant_id: str, *, patience_seconds: float | None) -> None:
        """Wait until a tenant owes nothing.

        Args:
            tenant_id: the tenant.
            patience_seconds: how long to wait at most; None: as long as it takes.

        Raises:
            QuotaExceeded: it takes longer than that, which is told at once.
        """
        give_up_at = None if patience_seconds is None else self._clock.monotonic() + patience_seconds
        while (seconds := self.seconds_until_free(tenant_id)) > 0:
            if give_up_at is not None and self._clock.monotonic() + seconds > give_up_at:
                self.check(tenant_id)
            await self._pause(min(max(seconds, _SHORTEST_SECONDS), _LONGEST_SECONDS))

    def _account(self, tenant_id: str) -> TokenBucket | None:
        quota = self._book.of(tenant_id)
        if quota.tokens_per_second is None:
            self._accounts.pop(tenant_id, None)
            return None
        rate, burst = float(quota.tokens_per_second), quota.burst
        now = self._clock.monotonic()
        known = self._accounts.get(tenant_id)
        if known is None:
            account = TokenBucket(rate=rate, burst=burst, now=now)
        else:
            account = known[2]
            if known[:2] != (rate, burst):
                account.change(rate=rate, burst=burst, now=now)
        self._accounts[tenant_id] = rate, burst, account
        return account
