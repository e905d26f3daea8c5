"""The sampler service of the contract. Each method converts, awaits its verb, and converts."""

# ruff: noqa: N802 (the methods have the contract's names)

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from services.kit.paging import page_token_after, parse_page
from services.kit.rpc.context import current_caller
from services.kit.rpc.fields import id_from_proto
from services.sampler.api import convert, convert_answers, convert_tokens
from services.sampler.application.verbs import Verbs
from twinkle.api.sampler.v1 import sampler_service_pb2 as wire
from twinkle.api.sampler.v1 import sampler_service_pb2_grpc

_Context = grpc.aio.ServicerContext[Any, Any]


class SamplerServicer(sampler_service_pb2_grpc.SamplerServiceServicer):
    """Samples."""

    def __init__(self, verbs: Verbs) -> None:
        """Serve `verbs`."""
        self._verbs = verbs

    async def Sample(self, request: wire.SampleRequest, context: _Context) -> AsyncIterator[wire.SampleResponse]:
        """Stream the completions of one prompt."""
        command = convert.sample_from_proto(request)
        async with aclosing(self._verbs.sample(current_caller(), command)) as events:
            async for event in events:
                yield convert_answers.event_to_proto(event)

    async def SampleBatch(
        self, request: wire.SampleBatchRequest, context: _Context
    ) -> AsyncIterator[wire.SampleBatchResponse]:
        """Complete many prompts."""
        command = convert.batch_from_proto(request)
        async with aclosing(self._verbs.sample_batch(current_caller(), command)) as prompts:
            async for prompt in prompts:
                yield convert_answers.completed_to_proto(prompt)

    async def ComputeLogprobs(
        self, request: wire.ComputeLogprobsRequest, context: _Context
    ) -> wire.ComputeLogprobsResponse:
        """Score tokens."""
        scores = await self._verbs.compute_logprobs(current_caller(), convert.logprobs_from_proto(request))
        return convert_answers.scores_to_proto(scores)

    async def DescribeTokens(
        self, request: wire.DescribeTokensRequest, context: _Context
    ) -> wire.DescribeTokensResponse:
        """Say what tokens stand for."""
        base_model, token_ids = convert_tokens.tokens_from_proto(request)
        return convert_tokens.forms_to_proto(await self._verbs.describe_tokens(base_model, token_ids))

    async def Abort(self, request: wire.AbortRequest, context: _Context) -> wire.AbortResponse:
        """End a request."""
        request_id = id_from_proto(request.request_id, 'request_id')
        await self._verbs.abort(current_caller(), request_id)
        return wire.AbortResponse()

    async def ListResidentAdapters(
        self, request: wire.ListResidentAdaptersRequest, context: _Context
    ) -> wire.ListResidentAdaptersResponse:
        """List what is held here."""
        query = f'ListResidentAdapters {current_caller().tenant_id}'
        page = parse_page(request.page_size, request.page_token, query=query, key_types=(str, int))
        versions, after = await self._verbs.list_resident_adapters(current_caller(), page)
        token = page_token_after(after, query=query)
        adapters = [convert_answers.resident_to_proto(version) for version in versions]
        return wire.ListResidentAdaptersResponse(adapters=adapters, next_page_token=token)

    async def LoadAdapter(self, request: wire.LoadAdapterRequest, context: _Context) -> wire.LoadAdapterResponse:
        """Bring an adapter here."""
        version = await self._verbs.load_adapter(current_caller(), convert.required_choice_from_proto(request))
        return wire.LoadAdapterResponse(adapter=convert_answers.resident_to_proto(version))

    async def UnloadAdapter(self, request: wire.UnloadAdapterRequest, context: _Context) -> wire.UnloadAdapterResponse:
        """Drop an adapter."""
        adapter_id = id_from_proto(request.adapter_id, 'adapter_id')
        await self._verbs.unload_adapter(current_caller(), adapter_id)
        return wire.UnloadAdapterResponse()

    async def GetLoad(self, request: wire.GetLoadRequest, context: _Context) -> wire.GetLoadResponse:
        """Say how busy the engine is."""
        return wire.GetLoadResponse(load=convert_answers.load_to_proto(await self._verbs.get_load()))

    async def WatchLoad(
        self, request: wire.WatchLoadRequest, context: _Context
    ) -> AsyncIterator[wire.WatchLoadResponse]:
        """Say so again and again."""
        interval = convert.interval_from_proto(request)
        async with aclosing(self._verbs.watch_load(interval)) as loads:
            async for load in loads:
                yield wire.WatchLoadResponse(load=convert_answers.load_to_proto(load))

    async def ResetPrefixCache(
        self, request: wire.ResetPrefixCacheRequest, context: _Context
    ) -> wire.ResetPrefixCacheResponse:
        """Empty the prefix cache."""
        dropped = await self._verbs.reset_prefix_cache(current_caller())
        return wire.ResetPrefixCacheResponse(dropped_token_count=dropped)

    async def Pause(self, request: wire.PauseRequest, context: _Context) -> wire.PauseResponse:
        """Stop the engine."""
        await self._verbs.pause(current_caller(), convert.pause_mode_from_proto(request.mode))
        return wire.PauseResponse()

    async def Resume(self, request: wire.ResumeRequest, context: _Context) -> wire.ResumeResponse:
        """Let it go on."""
        await self._verbs.resume(current_caller())
        return wire.ResumeResponse()

    async def Sleep(self, request: wire.SleepRequest, context: _Context) -> wire.SleepResponse:
        """Give memory back for a while."""
        await self._verbs.sleep(current_caller(), convert.sleep_level_from_proto(request.level))
        return wire.SleepResponse()

    async def WakeUp(self, request: wire.WakeUpRequest, context: _Context) -> wire.WakeUpResponse:
        """Take it again."""
        await self._verbs.wake_up(current_caller())
        return wire.WakeUpResponse()
