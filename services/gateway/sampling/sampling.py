"""Sampling over all samplers of the fleet, within quotas."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from datetime import timedelta
from itertools import chain

from twinkle_services.gateway.config import GatewayConfig
from twinkle_services.gateway.errors import NoReplica, SamplingNotFound
from twinkle_services.gateway.fleet.grpc import ReplicaChannels
from twinkle_services.gateway.fleet.members import Membership
from twinkle_services.gateway.fleet.rules import Replica, ReplicaLoad, ReplicaState, ResidentAdapter
from twinkle_services.gateway.fleet.sampler_choice import RouteKey
from twinkle_services.gateway.fleet.upstreams import GrpcLookups
from twinkle_services.gateway.quotas.enforcement import SamplingGate
from twinkle_services.gateway.quotas.quotas import Quotas
from twinkle_services.gateway.quotas.rules import Work
from twinkle_services.gateway.quotas.usage_meter import UsageMeter
from twinkle_services.gateway.sampling.batch import BatchCompletion, BatchDivision, BatchScoring, Scores
from twinkle_services.gateway.sampling.dispatch import Dispatch
from twinkle_services.gateway.sampling.grpc import SamplerClient
from twinkle_services.gateway.sampling.rules import (
    BatchRequest,
    PromptResult,
    RoutedRequest,
    SampleChunk,
    SampleRequest,
)
from twinkle_services.gateway.sampling.streams import RunningRequest, RunningRequests, SampleStream
from twinkle_services.gateway.sampling.suspects import Attempt
from twinkle_services.kit.caller import Caller, require_scope
from twinkle_services.kit.errors import DomainError, ServiceUnreachable
from twinkle_services.kit.errors.base import Code
from twinkle_services.kit.paging import Page

AdapterKey = tuple[str, int]
"""Adapter id and version."""
LOAD_SECONDS = 2.0
"""Maximum wait for a replica's load; slower replicas are omitted."""
_FIRST_PAUSE_SECONDS = 0.01
_LONGEST_PAUSE_SECONDS = 0.5


class Sampling:
    """Implements the operations of the sampler contract over the fleet.

    Every method raises ScopeMissing for a caller without the scope, NoReplica if no sampler is available, and the
    sampler's error as a DomainError. Deadlines are times on the event loop's clock, or None.
    """

    def __init__(self, dispatch: Dispatch, samplers: SamplerClient, *, gate: SamplingGate, meter: UsageMeter) -> None:
        self._dispatch = dispatch
        self._membership = dispatch.membership
        self._samplers = samplers
        self.gate = gate
        self._meter = meter
        self._requests = RunningRequests()
        self._division = BatchDivision(dispatch, samplers)

    async def sample(
        self, caller: Caller, request: SampleRequest, *, deadline: float | None = None
    ) -> AsyncGenerator[SampleChunk, None]:
        """Yield the chunks of the response; if its sampler is lost, another sampler continues the response.

        Raises:
            QuotaExceeded: the tenant has too many requests in flight, or is over its token rate.
            SamplingIdTaken: a request of the caller with that id is running.
        """
        tenant_id, run_id = caller.tenant_id, request.key.run_id
        async with self.gate.admitted(tenant_id, deadline=deadline):
            require_scope(caller, 'sample')
            with self._requests.running(tenant_id, request.request_id) as running:
                attempt = _attempt_of(caller, request, request.key, deadline)
                stream = SampleStream(self._dispatch, self._samplers, request, attempt=attempt, running=running)
                repeated = request.continued_work
                try:
                    async with aclosing(stream.chunks()) as chunks:
                        async for chunk in chunks:
                            for work in filter(None, (repeated, chunk.work)):
                                self._meter.count(tenant_id, run_id, work)
                            repeated = None
                            yield chunk
                finally:
                    # The sampler repeats this work even if the caller leaves before the first chunk.
                    if repeated is not None and stream.is_running:
                        self._meter.count(tenant_id, run_id, repeated)

    async def sample_batch(
        self, caller: Caller, request: BatchRequest, *, deadline: float | None = None
    ) -> AsyncGenerator[PromptResult, None]:
        """Yield the result of each prompt, in the order in which they finish.

        Raises:
            QuotaExceeded: the tenant has too many requests in flight, or is over its token rate.
            SamplingIdTaken: a request of the caller with that id is running.
        """
        async with (
            self.gate.admitted(caller.tenant_id, deadline=deadline),
            aclosing(self.complete(caller, request, deadline=deadline)) as results,
        ):
            async for result in results:
                self._meter.count(caller.tenant_id, request.keys[0].run_id, result.work)
                yield result

    async def complete(
        self, caller: Caller, request: BatchRequest, *, deadline: float | None = None
    ) -> AsyncGenerator[PromptResult, None]:
        """Yield the results as `sample_batch` does, but without quotas: the request is neither admitted nor counted."""
        require_scope(caller, 'sample')
        with self._requests.running(caller.tenant_id, request.request_id) as running:
            attempt = _attempt_of(caller, request, request.keys[0], deadline)
            batch = BatchCompletion(self._division, request, attempt=attempt, running=running)
            async with aclosing(batch.results()) as results:
                async for result in results:
                    yield result

    async def compute_logprobs(self, caller: Caller, request: BatchRequest, *, deadline: float | None = None) -> Scores:
        """Return the responses of the samplers; together they cover each sequence once.

        Raises:
            QuotaExceeded: the tenant has too many requests in flight, or is over its token rate.
        """
        async with self.gate.admitted(caller.tenant_id, deadline=deadline):
            require_scope(caller, 'sample')
            attempt = _attempt_of(caller, request, request.keys[0], deadline)
            scores = await BatchScoring(self._division, request).scores(attempt)
        work = Work(prompt_token_count=request.token_count, prompt_count=len(request.keys))
        self._meter.count(caller.tenant_id, request.keys[0].run_id, work)
        return scores

    async def abort(self, caller: Caller, request_id: str, message: bytes) -> None:
        """Abort a request on all replicas that run it; its sequences finish with the stop reason 'abort'.

        If this gateway does not run the request, `message`, the serialized AbortRequest, is sent to all replicas.

        Raises:
            DomainError: no request of the caller with that id is running; the code is NOT_FOUND.
        """
        require_scope(caller, 'sample')
        running = self._requests.find(caller.tenant_id, request_id)
        if running is None:
            try:
                await self.call_all(caller, 'Abort', message, scope='sample')
            except NoReplica as error:
                raise SamplingNotFound(request_id) from error
            return
        running.aborted.set()
        await asyncio.gather(*(self._abort_part(running, part, address) for part, address in running.parts.items()))

    async def call_one(self, caller: Caller, request: RoutedRequest, *, deadline: float | None = None) -> bytes:
        """Return the response of the chosen replica, or of another replica if the first one fails."""
        require_scope(caller, 'sample')
        attempt = Attempt(key=request.key, tenant_id=caller.tenant_id, message=request.message, deadline=deadline)
        while True:
            replica = await self._dispatch.find(attempt)
            try:
                with self._dispatch.track(replica, attempt):
                    response = await self._samplers.call(
                        replica.address, request.method, request.message, deadline=deadline
                    )
            except DomainError as error:
                self._dispatch.record_failure(attempt, replica, error)
            else:
                self._dispatch.record_success(attempt, replica, has_tokens=True)
                return response

    async def call_all(
        self, caller: Caller, method: str, message: bytes, *, scope: str, deadline: float | None = None
    ) -> list[bytes]:
        """Call a method, such as Pause, on all replicas concurrently and return the responses, at least one.

        Raises:
            DomainError: a replica's error; other replicas may have succeeded. An error with the code NOT_FOUND is
                raised only if all replicas return such an error.
        """
        require_scope(caller, scope)

        async def call(replica: Replica) -> bytes:
            with self._membership.track_sequences(replica, 0):
                return await self._samplers.call(replica.address, method, message, deadline=deadline)

        return _responses_among(await asyncio.gather(*map(call, self._members()), return_exceptions=True))

    async def load_adapter(self, caller: Caller, request: RoutedRequest, *, deadline: float | None = None) -> bytes:
        """Load an adapter at the replica that requests for the adapter will reach first, and return the response.

        The request does not name the base model, so each base model of the fleet is tried until a sampler accepts it.
        """
        serving = self._membership.fleet.serving('sampler')
        *others, last = sorted({name for item in serving for name in item.report.base_models}) or ['']
        for base_model in others:
            try:
                return await self.call_one(caller, _for_base(request, base_model), deadline=deadline)
            except DomainError as error:
                # The sampler refuses an adapter of a different base model, which the gateway cannot check.
                if error.reason != 'INVALID_FIELD':
                    raise
        return await self.call_one(caller, _for_base(request, last), deadline=deadline)

    async def list_resident_adapters(
        self, caller: Caller, page: Page, *, deadline: float | None = None
    ) -> tuple[list[ResidentAdapter], AdapterKey | None]:
        """Return a page of the caller's adapter versions, by adapter and version, and the key of the last version.

        A version that several replicas have is listed once. The last page has no key.
        """
        require_scope(caller, 'sample')
        lists = await asyncio.gather(
            *(self._samplers.resident_adapters(item.address, deadline=deadline) for item in self._members())
        )
        merged: dict[AdapterKey, ResidentAdapter] = {}
        for item in chain.from_iterable(lists):
            key = (item.adapter_id, item.version)
            count = item.sequence_count + (merged[key].sequence_count if key in merged else 0)
            merged[key] = replace(item, sequence_count=count)
        found = [merged[key] for key in sorted(merged) if page.after is None or key > page.after]
        items = found[: page.size]
        after = (items[-1].adapter_id, items[-1].version) if len(found) > page.size else None
        return items, after

    async def load(self, caller: Caller) -> ReplicaLoad:
        """Return the total load of the replicas that respond in time."""
        require_scope(caller, 'sample')
        deadline = asyncio.get_running_loop().time() + LOAD_SECONDS
        results = await asyncio.gather(
            *(self._samplers.load(replica.address, deadline=deadline) for replica in self._members()),
            return_exceptions=True,
        )
        loads = [result for result in results if isinstance(result, ReplicaLoad)]
        for error in results:
            if isinstance(error, BaseException) and (not loads or not isinstance(error, DomainError)):
                raise error
        return total_load(loads)

    async def watch_load(self, caller: Caller, interval: timedelta) -> AsyncGenerator[ReplicaLoad, None]:
        """Yield the load now and after every `interval`, until the gateway stops."""
        is_closing = self._membership.is_closing
        while not is_closing.is_set():
            yield await self.load(caller)
            with suppress(TimeoutError):
                async with asyncio.timeout(interval.total_seconds()):
                    await is_closing.wait()

    def _members(self) -> list[Replica]:
        """Return the replicas for a call to all replicas: those that are not lost or, if all are lost, all of them."""
        serving = self._membership.fleet.serving('sampler')
        members = [replica for replica in serving if replica.state is not ReplicaState.LOST] or serving
        if not members:
            raise self._dispatch.unavailable(RouteKey(base_model=''))
        return members

    async def _abort_part(self, running: RunningRequest, part: str, address: str) -> None:
        """Abort a part. Retry until the part ends, because the replica may not have received it yet."""
        pause = _FIRST_PAUSE_SECONDS
        while running.parts.get(part) == address and not await self._samplers.abort(address, part):
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def total_load(loads: Sequence[ReplicaLoad]) -> ReplicaLoad:
    """Return the combined load of several replicas; fractions are weighted averages."""
    capacity = sum(load.max_sequence_count for load in loads)
    speed = sum(load.tokens_per_second for load in loads)
    return ReplicaLoad(
        running_sequence_count=sum(load.running_sequence_count for load in loads),
        waiting_sequence_count=sum(load.waiting_sequence_count for load in loads),
        kv_usage=sum(load.kv_usage * load.max_sequence_count for load in loads) / capacity if capacity else 0.0,
        tokens_per_second=speed,
        prefix_hit_rate=sum(load.prefix_hit_rate * load.tokens_per_second for load in loads) / speed if speed else 0.0,
        is_paused=all(load.is_paused for load in loads),
        max_sequence_count=capacity,
        is_sleeping=all(load.is_sleeping for load in loads),
    )


def _attempt_of(
    caller: Caller, request: SampleRequest | BatchRequest, key: RouteKey, deadline: float | None
) -> Attempt:
    return Attempt(
        key=key, tenant_id=caller.tenant_id, message=request.message, request_id=request.request_id, deadline=deadline
    )


def _responses_among(results: Sequence[bytes | BaseException]) -> list[bytes]:
    """Return the responses.

    Raises:
        DomainError: an error about the request takes precedence over connection errors. An error with the code
            NOT_FOUND is raised only if there are no responses and no other errors.
    """
    responses = [result for result in results if isinstance(result, bytes)]
    errors = [result for result in results if isinstance(result, BaseException)]
    relevant = [error for error in errors if not (isinstance(error, DomainError) and error.code is Code.NOT_FOUND)]
    if relevant:
        raise min(relevant, key=lambda error: isinstance(error, ServiceUnreachable))
    if not responses:
        raise errors[0]
    return responses


def _for_base(request: RoutedRequest, base_model: str) -> RoutedRequest:
    return replace(request, key=replace(request.key, base_model=base_model))


def open_sampling(
    config: GatewayConfig, membership: Membership, channels: ReplicaChannels, *, lookups: GrpcLookups, quotas: Quotas
) -> Sampling:
    """Return the sampling operations; their quota gate also admits the futures of sampling requests."""
    options = config.fleet
    dispatch = Dispatch(
        membership,
        replica_wait=options.replica_wait,
        begin_wait=options.begin_wait,
        waiting_per_tenant=options.waiting_per_tenant,
        weight_of=quotas.table.weight_of,
    )
    gate = SamplingGate(quotas.table, quotas.rates, patience=config.quotas.patience)
    samplers = SamplerClient(channels, lookups, internal_token=config.internal_token)
    return Sampling(dispatch, samplers, gate=gate, meter=quotas.meter)
