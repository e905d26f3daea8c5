"""The verb that scores given tokens, on as many samplers as there are."""

import asyncio
from dataclasses import replace

from services.gateway.fleet.rules import Replica
from services.gateway.sampling.batches import Batches, fact_of
from services.gateway.sampling.failover import Attempt
from services.gateway.sampling.rules import BatchOrder, Share
from services.kit.authority import require_scope
from services.kit.caller import Caller
from services.kit.errors import DomainError

Scores = list[tuple[tuple[int, ...], bytes]]
"""Answers as they came, each with the places in the order of the sequences that it is about."""


class ComputeLogprobs:
    """Scores with one version throughout; what a sampler left undone is done again by others."""

    def __init__(self, batches: Batches) -> None:
        """Divide by `batches`."""
        self._batches = batches

    async def __call__(self, caller: Caller, order: BatchOrder, *, deadline: float | None = None) -> Scores:
        """Return the answers; together they are about all sequences, each once.

        Raises:
            ScopeMissing: the caller may not sample.
            NoReplica: nobody is there.
            DomainError: as a sampler says.
        """
        require_scope(caller, 'sample')
        version = await self._batches.version_of(order, deadline=deadline)
        whole = Share(order=order, positions=tuple(range(len(order.keys))), version=version)
        return await self._answer(whole, Attempt(key=order.keys[0], tenant_id=caller.tenant_id, deadline=deadline))

    async def _answer(self, share: Share, attempt: Attempt) -> Scores:
        parts = await self._batches.divide(share, attempt)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._from(replica, part, replace(attempt, tried=set(attempt.tried))))
                    for replica, part in parts
                ]
        except BaseExceptionGroup as errors:
            raise fact_of(errors) from None
        return [score for task in tasks for score in task.result()]

    async def _from(self, replica: Replica, share: Share, attempt: Attempt) -> Scores:
        dispatch = self._batches.dispatch
        try:
            with dispatch.place(replica, attempt, share.weight) as place:
                await place.turn()
                raw = await self._batches.samplers.score(replica.address, share, deadline=attempt.deadline)
        except DomainError as error:
            dispatch.failed(attempt, replica, error)
            return await self._answer(share, attempt)
        return [(share.positions, raw)]
