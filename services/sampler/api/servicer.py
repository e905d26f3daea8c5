"""Servicer of SamplerService. Each method converts the request, calls the application, and converts the result."""

# ruff: noqa: N802 (the methods have the names of the RPCs)

from collections.abc import AsyncIterator
from contextlib import aclosing

from twinkle.api.sampler.v1 import sampler_service_pb2 as wire
from twinkle.api.sampler.v1 import sampler_service_pb2_grpc
from twinkle_services.kit.paging import page_token_after, parse_page
from twinkle_services.kit.rpc.call import Context
from twinkle_services.kit.rpc.context import current_caller
from twinkle_services.kit.rpc.fields import id_from_proto
from twinkle_services.sampler.api import convert, convert_responses
from twinkle_services.sampler.application.engine_control import EngineControl
from twinkle_services.sampler.application.resident_adapters import ResidentAdapters
from twinkle_services.sampler.application.sampling import Sampling


class SamplerServicer(sampler_service_pb2_grpc.SamplerServiceServicer):
    """Serves SamplerService."""

    def __init__(self, sampling: Sampling, control: EngineControl, adapters: ResidentAdapters) -> None:
        self._sampling = sampling
        self._control = control
        self._adapters = adapters

    async def Sample(self, request: wire.SampleRequest, context: Context) -> AsyncIterator[wire.SampleResponse]:
        sample = convert.sample_from_proto(request)
        async with aclosing(self._sampling.sample(current_caller(), sample)) as events:
            async for event in events:
                yield convert_responses.event_to_proto(event)

    async def SampleBatch(
        self, request: wire.SampleBatchRequest, context: Context
    ) -> AsyncIterator[wire.SampleBatchResponse]:
        batch = convert.batch_from_proto(request)
        async with aclosing(self._sampling.sample_batch(current_caller(), batch)) as prompts:
            async for prompt in prompts:
                yield convert_responses.completed_to_proto(prompt)

    async def ComputeLogprobs(
        self, request: wire.ComputeLogprobsRequest, context: Context
    ) -> wire.ComputeLogprobsResponse:
        scores = await self._sampling.compute_logprobs(current_caller(), convert.logprobs_from_proto(request))
        return convert_responses.scores_to_proto(scores)

    async def DescribeTokens(
        self, request: wire.DescribeTokensRequest, context: Context
    ) -> wire.DescribeTokensResponse:
        base_model, token_ids = convert.tokens_from_proto(request)
        return convert_responses.forms_to_proto(await self._sampling.describe_tokens(base_model, token_ids))

    async def Abort(self, request: wire.AbortRequest, context: Context) -> wire.AbortResponse:
        await self._control.abort(current_caller(), id_from_proto(request.request_id, 'request_id'))
        return wire.AbortResponse()

    async def ListResidentAdapters(
        self, request: wire.ListResidentAdaptersRequest, context: Context
    ) -> wire.ListResidentAdaptersResponse:
        query = f'ListResidentAdapters {current_caller().tenant_id}'
        page = parse_page(request.page_size, request.page_token, query=query, key_types=(str, int))
        versions, after = await self._adapters.list_page(current_caller(), page)
        token = page_token_after(after, query=query)
        adapters = [convert_responses.resident_to_proto(version) for version in versions]
        return wire.ListResidentAdaptersResponse(adapters=adapters, next_page_token=token)

    async def LoadAdapter(self, request: wire.LoadAdapterRequest, context: Context) -> wire.LoadAdapterResponse:
        version = await self._adapters.load(current_caller(), convert.required_choice_from_proto(request))
        return wire.LoadAdapterResponse(adapter=convert_responses.resident_to_proto(version))

    async def UnloadAdapter(self, request: wire.UnloadAdapterRequest, context: Context) -> wire.UnloadAdapterResponse:
        await self._adapters.unload(current_caller(), id_from_proto(request.adapter_id, 'adapter_id'))
        return wire.UnloadAdapterResponse()

    async def GetLoad(self, request: wire.GetLoadRequest, context: Context) -> wire.GetLoadResponse:
        return wire.GetLoadResponse(load=convert_responses.load_to_proto(self._control.load))

    async def WatchLoad(
        self, request: wire.WatchLoadRequest, context: Context
    ) -> AsyncIterator[wire.WatchLoadResponse]:
        interval = convert.interval_from_proto(request)
        async with aclosing(self._control.watch_load(interval)) as loads:
            async for load in loads:
                yield wire.WatchLoadResponse(load=convert_responses.load_to_proto(load))

    async def ResetPrefixCache(
        self, request: wire.ResetPrefixCacheRequest, context: Context
    ) -> wire.ResetPrefixCacheResponse:
        dropped = await self._control.reset_prefix_cache(current_caller())
        return wire.ResetPrefixCacheResponse(dropped_token_count=dropped)

    async def Pause(self, request: wire.PauseRequest, context: Context) -> wire.PauseResponse:
        await self._control.pause(current_caller(), convert.pause_mode_from_proto(request.mode))
        return wire.PauseResponse()

    async def Resume(self, request: wire.ResumeRequest, context: Context) -> wire.ResumeResponse:
        await self._control.resume(current_caller())
        return wire.ResumeResponse()

    async def Sleep(self, request: wire.SleepRequest, context: Context) -> wire.SleepResponse:
        await self._control.sleep(current_caller(), convert.sleep_level_from_proto(request.level))
        return wire.SleepResponse()

    async def WakeUp(self, request: wire.WakeUpRequest, context: Context) -> wire.WakeUpResponse:
        await self._control.wake_up(current_caller())
        return wire.WakeUpResponse()
