"""The steps that verbs with many prompts share: one version for all of them, and a fair part for each replica."""

import asyncio
from contextlib import ExitStack
from dataclasses import replace
from typing import cast

from services.gateway.fleet.rules import Replica
from services.gateway.sampling.dispatch import Dispatch
from services.gateway.sampling.failover import Attempt
from services.gateway.sampling.ports import Samplers
from services.gateway.sampling.rules import BatchOrder, Share
from services.kit.errors import DomainError
from services.kit.ids import new_id

_KEYS_AT_ONCE = 64
"""Prompts that are given out before other calls get their turn."""


class Batches:
    """Divides batches."""

    def __init__(self, dispatch: Dispatch, samplers: Samplers) -> None:
        """Divide among those that `dispatch` finds."""
        self.dispatch = dispatch
        self.samplers = samplers

    async def version_of(self, order: BatchOrder, *, deadline: float | None) -> int | None:
        """Return the version that all prompts are to be answered with; None where the order says it itself.

        The replica that it is asked of holds it from then on.

        Raises:
            DomainError: as the sampling verbs of the contract say.
        """
        if not order.is_version_open:
            return None
        attempt = Attempt(key=order.keys[0], deadline=deadline)
        membership = self.dispatch.membership
        while True:
            replica = await self.dispatch.find(attempt)
            try:
                with membership.working(replica, 0):
                    version = await self.samplers.resolve(replica.address, order, deadline=deadline)
            except DomainError as error:
                self.dispatch.failed(attempt, replica, error)
                continue
            if (adapter := order.keys[0].adapter) is not None:
                membership.fleet.note_resident(replica.replica_id, adapter.adapter_id, version)
            return version

    async def divide(self, share: Share, attempt: Attempt) -> list[tuple[Replica, Share]]:
        """Return who gets which prompts of a share; together all of them.

        Raises:
            DomainError: as `Dispatch.find`.
        """
        first = await self.dispatch.find(attempt)
        groups: dict[str, tuple[Replica, list[int]]] = {}
        with ExitStack() as counted:
            for number, position in enumerate(share.positions):
                key = share.order.keys[position]
                replica = self.dispatch.membership.find_for(key, excluded=attempt.tried) or first
                counted.enter_context(self.dispatch.membership.working(replica, key.weight))
                groups.setdefault(replica.replica_id, (replica, []))[1].append(position)
                if number % _KEYS_AT_ONCE == _KEYS_AT_ONCE - 1:
                    await asyncio.sleep(0)
        return [(replica, self.part_of(share, positions)) for replica, positions in groups.values()]

    def part_of(self, share: Share, positions: list[int]) -> Share:
        """Return a part of a share, under an id of its own unless it is all there is, for the first time."""
        is_all = len(positions) == len(share.order.keys) and not share.is_again
        return replace(share, positions=tuple(positions), request_id='' if is_all else new_id('rq'))


def fact_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return what a task group was ended by."""
    first = group.exceptions[0]
    if isinstance(first, BaseExceptionGroup):
        return fact_of(cast('BaseExceptionGroup[BaseException]', first))
    return first
