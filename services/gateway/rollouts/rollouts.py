"""Operations on rollouts."""

import asyncio
from collections.abc import Awaitable, Callable

from twinkle_services.gateway.catalogue.runs import Runs, TenantTurns, find_new_run
from twinkle_services.gateway.errors import RolloutNotFound
from twinkle_services.gateway.rollouts.rules import (
    GroupKey,
    Groups,
    RolloutFilter,
    RolloutPage,
    StoredRollout,
    parse_rollout_id,
)
from twinkle_services.gateway.rollouts.sql import SqlRolloutStore
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.clock import Clock


class Rollouts:
    """Stores and reads the rollouts of a caller's runs."""

    def __init__(
        self,
        store: SqlRolloutStore,
        runs: Runs,
        *,
        clock: Clock,
        max_bytes: int,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Limit the stored rollouts of each run to `max_bytes`; `pause` sleeps for some seconds."""
        self._store = store
        self._runs = runs
        self._clock = clock
        self._max_bytes = max_bytes
        self._pause = pause
        self._turns, self._log_turns = TenantTurns(), TenantTurns()

    async def log(self, caller: Caller, run_id: str, step: int, groups: Groups) -> int:
        """Store rollouts of a run, and return the number of older groups that were removed to make room.

        A rollout with the step, group and index of a stored one replaces it.

        Raises:
            RunNotFound: the caller has no such run.
            RolloutsTooLarge: the changed groups have more bytes than a run or a request may have; nothing is stored.
        """
        await find_new_run(self._runs, caller, run_id, pause=self._pause)
        run = caller.tenant_id, run_id
        async with self._log_turns.of(caller.tenant_id):
            return await self._store.save(run, step, groups, moment=self._clock.now(), max_bytes=self._max_bytes)

    async def list(
        self, caller: Caller, run_id: str, wanted: RolloutFilter, *, size: int, after: GroupKey | None
    ) -> RolloutPage:
        """Return at most `size` groups of a run that match `wanted` and follow the group `after`.

        Raises:
            RunNotFound: the caller has no such run.
        """
        await self._runs.get(caller, run_id)
        async with self._turns.of(caller.tenant_id):
            return await self._store.list_page((caller.tenant_id, run_id), wanted, size=size, after=after)

    async def get(self, caller: Caller, run_id: str, rollout_id: str) -> StoredRollout:
        """Return a rollout of a run.

        Raises:
            RunNotFound: the caller has no such run.
            RolloutNotFound: the run has no such rollout.
        """
        await self._runs.get(caller, run_id)
        parsed = parse_rollout_id(rollout_id)
        async with self._turns.of(caller.tenant_id):
            found = None if parsed is None else await self._store.get((caller.tenant_id, run_id), *parsed)
        if found is None:
            raise RolloutNotFound(rollout_id)
        return found
