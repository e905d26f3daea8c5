"""Models that can be sampled: sampling on the fleet, resolution of model names, and lists of models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from twinkle.api.sampler.v1 import sampler_service_pb2 as wire
from twinkle.api.sampler.v1 import sampling_pb2
from twinkle.api.server.v1 import server_service_pb2
from twinkle_services.gateway.catalogue.paths import NATIVE_SCHEME, SCHEME, parse_sampler_path
from twinkle_services.gateway.catalogue.rules import Run, RunFilter
from twinkle_services.gateway.catalogue.runs import Runs
from twinkle_services.gateway.errors import NoReplica, RunNotFound
from twinkle_services.gateway.fleet.members import Membership
from twinkle_services.gateway.fleet.model_routes import served_name, shown_name
from twinkle_services.gateway.fleet.rules import ReplicaReport
from twinkle_services.gateway.fleet.upstreams import GrpcLookups
from twinkle_services.gateway.paging import Page
from twinkle_services.gateway.sampling.convert import (
    batch_request_from_bytes,
    describe_request_from_bytes,
    sample_request_from_bytes,
)
from twinkle_services.gateway.sampling.sampling import Sampling
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import BaseModelNotFound, Code, DomainError, InvalidField

MAX_NAME = 512
MAX_LISTED_RUNS = 1000
"""A list of models ends with the page that reaches this number of runs; older runs can still be used by name."""
_MAX_VERSION_DIGITS = 18
_PAGE_SIZE = 200
_SERVICE = 'sampler'
_QUEUE_EVENTS = 64
"""Maximum number of events that wait for the client during a request with several prompts."""


class FleetSamplers:
    """Samples on the fleet like the gateway's SamplerService, and raises the same errors."""

    def __init__(
        self,
        sampling: Sampling,
        membership: Membership,
        *,
        describe: Callable[[], Awaitable[server_service_pb2.ServiceInfo]],
    ) -> None:
        self._sampling = sampling
        self._membership = membership
        self._describe = describe

    async def sample(self, caller: Caller, request: wire.SampleRequest) -> AsyncGenerator[wire.SampleResponse, None]:
        """Yield the parts of the response. Closing the generator cancels the sampling; a slow reader delays it."""
        parsed = sample_request_from_bytes(request.SerializeToString(), request)
        async with aclosing(self._sampling.sample(caller, parsed)) as responses:
            async for response in responses:
                yield wire.SampleResponse.FromString(response.message)

    async def sample_batch(
        self, caller: Caller, request: wire.SampleBatchRequest
    ) -> AsyncGenerator[wire.SampleBatchResponse, None]:
        """Yield the result of each prompt when it is finished. Closing the generator cancels the other prompts."""
        parsed = batch_request_from_bytes(request.SerializeToString(), request)
        async with aclosing(self._sampling.sample_batch(caller, parsed)) as results:
            async for result in results:
                yield wire.SampleBatchResponse.FromString(result.message)

    async def describe_tokens(self, caller: Caller, request: wire.DescribeTokensRequest) -> wire.DescribeTokensResponse:
        parsed = describe_request_from_bytes(request.SerializeToString())
        return wire.DescribeTokensResponse.FromString(await self._sampling.call_one(caller, parsed))

    def base_model_names(self) -> Sequence[str]:
        """Return the sorted names of the base models that can be sampled, including those of recently lost replicas.

        Raises:
            NoReplica: the fleet serves no base model.
        """
        names = sorted({name for report in self._reports() if not report.followed_run for name in report.base_models})
        if not names:
            raise NoReplica(_SERVICE)
        return names

    def can_serve(self, run: Run) -> bool:
        """Return whether a sampler serves the versions of a run; a full-parameter run needs a dedicated sampler."""
        return any(
            report.followed_run == run.run_id
            or (not report.followed_run and run.lora_rank > 0 and run.base_model in report.base_models)
            for report in self._reports()
        )

    def _reports(self) -> list[ReplicaReport]:
        # Lost replicas are included: a request for their models waits a short time for them to return.
        reports = [replica.report for replica in self._membership.fleet.replicas()]
        return [report for report in reports if report.service == _SERVICE]

    async def base_models(self) -> Sequence[server_service_pb2.BaseModelInfo]:
        """Return the base models that can be sampled, sorted by name. Raise the errors of `base_model_names`."""
        info = await self._describe()
        found = {model.base_model: model for model in info.base_models}
        return [found.get(name, server_service_pb2.BaseModelInfo(base_model=name)) for name in self.base_model_names()]

    async def tool_call_format(self, base_model: str) -> str:
        """Return the format of the base model's tool calls; empty if its chat template does not render tools.

        Raises:
            NoReplica: no sampler of the base model responds.
        """
        for info in (await self._describe()).base_models:
            if info.base_model == base_model:
                return info.tool_call_format
        raise NoReplica(_SERVICE, base_model)


IndexedResponse = tuple[int, wire.SampleResponse]
"""Index of a prompt, and a response to it."""


async def sample_all(
    samplers: FleetSamplers, caller: Caller, requests: Sequence[wire.SampleRequest]
) -> AsyncGenerator[IndexedResponse, None]:
    """Yield all responses as they arrive. If one of several requests fails, cancel all and raise an exception group."""
    if len(requests) == 1:
        async with aclosing(samplers.sample(caller, requests[0])) as responses:
            async for response in responses:
                yield 0, response
        return
    queue: asyncio.Queue[IndexedResponse] = asyncio.Queue(_QUEUE_EVENTS)

    async def read(index: int, request: wire.SampleRequest) -> None:
        async with aclosing(samplers.sample(caller, request)) as responses:
            async for response in responses:
                await queue.put((index, response))

    async def read_all() -> None:
        async with asyncio.TaskGroup() as readers:
            for index, request in enumerate(requests):
                readers.create_task(read(index, request))

    reading = asyncio.create_task(read_all())
    try:
        async for item in _until_done(queue, reading):
            yield item
        await reading
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def _until_done(
    queue: asyncio.Queue[IndexedResponse], reading: asyncio.Task[None]
) -> AsyncGenerator[IndexedResponse, None]:
    while not (reading.done() and queue.empty()):
        if not queue.empty():
            yield queue.get_nowait()
            continue
        getting = asyncio.ensure_future(queue.get())
        try:
            await asyncio.wait({getting, reading}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # A cancelled `get` loses no item, so this also cleans up when the client disconnects.
            getting.cancel()
        if getting.done():
            yield getting.result()


@dataclass(frozen=True, kw_only=True)
class ResolvedModel:
    """Weights that a model name refers to."""

    base_model: str
    adapter: sampling_pb2.AdapterRef | None = None
    """None for the base model alone."""
    run: Run | None = None


class ModelResolver:
    """Finds and lists models for a caller: base models, runs, versions of runs, and checkpoints."""

    def __init__(self, samplers: FleetSamplers, *, runs: Runs, lookups: GrpcLookups, started_at: datetime) -> None:
        self._samplers = samplers
        self._runs = runs
        self._lookups = lookups
        self._created = int(started_at.timestamp())
        """Reported creation time of base models, in seconds since 1970."""

    async def find(self, caller: Caller, name: str) -> ResolvedModel:
        """Resolve the name of a base model, a run, `<run>@<version>` or a checkpoint, optionally after `<base model>;`.

        Raises:
            BaseModelNotFound: no model of the caller has this name.
            InvalidField: a Tinker path is malformed, or the weights have a different base model.
            DomainError: no sampler is available, or the checkpoint cannot be looked up now; the code is UNAVAILABLE.
        """
        base_models = self._samplers.base_model_names()
        if (served := served_name(name, base_models)) is not None:
            return ResolvedModel(base_model=served)
        base, separator, weights = name.partition(';')
        for run_id, adapter in _candidates(weights if separator else name):
            try:
                run = await self._runs.get(caller, run_id)
            except RunNotFound:
                run = None
            found = run.base_model if run else await self._base_model_of(adapter)
            if found and separator and served_name(base, (found,)) is None:
                problem = f'names {base[:MAX_NAME]!r}, but the base model of the weights is {found!r}'
                raise InvalidField('model', problem)
            if found:
                return ResolvedModel(base_model=found, adapter=adapter, run=run)
        raise BaseModelNotFound(name[:MAX_NAME], tuple(map(shown_name, base_models)))

    async def list_all(self, caller: Caller) -> list[dict[str, Any]]:
        """Return the base models, then the runs of the caller that can be sampled, each with its newest version."""
        infos = await self._samplers.base_models()
        models = [self._base_model(shown_name(info.base_model), info.context_tokens) for info in infos]
        for run in await self._listed_runs(caller):
            models += [_run_model(run, name) for name in (run.run_id, f'{run.run_id}@{run.version}')]
        return models

    async def show(self, caller: Caller, name: str) -> dict[str, Any]:
        """Return the JSON form of one model; raise the errors of `find`."""
        model = await self.find(caller, name)
        if model.run is not None:
            return _run_model(model.run, name, version=model.adapter.exact if model.adapter else 0)
        context_tokens = {info.base_model: info.context_tokens for info in await self._samplers.base_models()}
        return self._base_model(name, context_tokens.get(model.base_model, 0))

    def _base_model(self, name: str, context_tokens: int) -> dict[str, Any]:
        return _model(name, created=self._created, owned_by='twinkle', max_model_len=context_tokens)

    async def _base_model_of(self, adapter: sampling_pb2.AdapterRef) -> str:
        """Return the base model of weights whose run is not in the catalogue; empty if the caller cannot use them."""
        try:
            if adapter.checkpoint_path:
                return (await self._lookups.checkpoint(adapter.checkpoint_path)).base_model
            return (await self._lookups.adapter(adapter.adapter_id)).base_model
        except DomainError as error:
            if adapter.checkpoint_path and error.code is Code.UNAVAILABLE:
                raise
            return ''

    async def _listed_runs(self, caller: Caller) -> Sequence[Run]:
        runs: list[Run] = []
        page = Page(size=_PAGE_SIZE)
        while len(runs) < MAX_LISTED_RUNS:
            listing = await self._runs.list(caller, page, RunFilter(is_active=True, is_published=True))
            runs += filter(self._samplers.can_serve, listing.items)
            if listing.next_cursor is None:
                break
            page = Page(size=_PAGE_SIZE, after=listing.next_cursor)
        return runs


def _run_model(run: Run, name: str, *, version: int = 0) -> dict[str, Any]:
    """Return the JSON form of a run, or of one of its versions; 0 is the newest version."""
    facts = {'version': version or run.version, 'step_count': run.step_count, 'lora_rank': run.lora_rank}
    created = int(run.create_time.timestamp())
    base_model = shown_name(run.base_model)
    model = _model(name, created=created, owned_by=run.tenant_id, root=base_model, parent=base_model)
    return {**model, 'twinkle': {'run_id': run.run_id, **facts, 'is_active': run.is_active}}


def _model(name: str, **facts: Any) -> dict[str, Any]:
    return {'id': name, 'object': 'model', **facts}


def _candidates(name: str) -> list[tuple[str, sampling_pb2.AdapterRef]]:
    """Return the pairs of run id and weights that a name may refer to, in the order in which to try them."""
    # Databases cannot store NUL in strings.
    if len(name) > MAX_NAME or '\0' in name:
        return []
    if name.startswith(SCHEME):
        path = parse_sampler_path(name, 'model')
        return [(path.run_id, sampling_pb2.AdapterRef(checkpoint_path=path.native))]
    if name.startswith(NATIVE_SCHEME):
        run_id, _, rest = name.removeprefix(NATIVE_SCHEME).partition('/')
        is_complete = rest.startswith('weights/') and len(rest) > len('weights/')
        return [(run_id, sampling_pb2.AdapterRef(checkpoint_path=name))] if run_id and is_complete else []
    candidates = [(name, sampling_pb2.AdapterRef(adapter_id=name))] if name else []
    run_id, separator, digits = name.rpartition('@')
    is_version = digits.isascii() and digits.isdigit() and len(digits) <= _MAX_VERSION_DIGITS
    if separator and run_id and is_version and int(digits) >= 1:
        candidates.append((run_id, sampling_pb2.AdapterRef(adapter_id=run_id, exact=int(digits))))
    return candidates
