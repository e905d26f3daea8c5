"""Routes of the OpenAI API, and of Anthropic's messages."""

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

from twinkle.api.sampler.v1 import sampler_service_pb2 as wire
from twinkle_services.gateway.catalogue.runs import Runs
from twinkle_services.gateway.config import GatewayConfig
from twinkle_services.gateway.fleet.upstreams import GrpcLookups
from twinkle_services.gateway.http.body import read_json
from twinkle_services.gateway.http.call import EncodedResponse, EventResponse, HttpCall, JsonResponse, Response, Route
from twinkle_services.gateway.openai.anthropic_events import MessageErrors, MessageWriter
from twinkle_services.gateway.openai.anthropic_request import message_request
from twinkle_services.gateway.openai.chat_request import chat_request
from twinkle_services.gateway.openai.choices import ChoiceDelta, ChoiceReader, TokenTexts
from twinkle_services.gateway.openai.completion_responses import ChatFormat, CompletionFormat, ResponseWriter, Writer
from twinkle_services.gateway.openai.embeddings import check_size, embedding_request, embedding_response
from twinkle_services.gateway.openai.errors import BLOCK_PARAMS, ITEM_PARAMS, OpenAiErrors
from twinkle_services.gateway.openai.models import FleetSamplers, ModelResolver, ResolvedModel, sample_all
from twinkle_services.gateway.openai.request import GenerationRequest, completion_request
from twinkle_services.gateway.openai.responses_events import ItemWriter
from twinkle_services.gateway.openai.responses_request import item_request
from twinkle_services.gateway.openai.tool_calls import ToolCallReader
from twinkle_services.gateway.openai.tools import ToolUse, explained
from twinkle_services.kit.clock import Clock
from twinkle_services.kit.errors import DomainError
from twinkle_services.kit.rpc.context import current_caller

SAMPLE_METHOD = '/twinkle.api.sampler.v1.SamplerService/Sample'
"""RPC method whose access rules apply to all routes."""
PREFIXES = ('/v1', '/oai/api/v1')
"""Prefixes of the routes: OpenAI's, and the prefix under which Tinker serves this API."""


class OpenAiRoutes:
    """Routes of models, completions, chat completions, responses, embeddings, and Anthropic's messages."""

    def __init__(self, samplers: FleetSamplers, models: ModelResolver, *, clock: Clock, body_bytes: int) -> None:
        """Create the routes; a request body may have at most `body_bytes` bytes."""
        self._samplers = samplers
        self._models = models
        self._tokens = TokenTexts(samplers)
        self._clock = clock
        self._body_bytes = body_bytes
        self._hidden_sizes: dict[str, int] = {}
        """Hidden sizes by base model, from the embeddings that were returned so far."""

    def routes(self) -> list[Route]:
        shared = OpenAiErrors()
        complete = partial(self._generate, completion_request, partial(ResponseWriter, form=CompletionFormat))
        chat = partial(self._generate, chat_request, partial(ResponseWriter, form=ChatFormat))
        respond = partial(self._generate, item_request, ItemWriter, is_named=True)
        answer = partial(self._generate, message_request, MessageWriter, is_named=True)
        rows = (
            ('GET', '/models', 'openai.models.list', self._list_models, shared),
            ('GET', '/models/{model:path}', 'openai.models.get', self._get_model, shared),
            ('POST', '/completions', 'openai.completions', complete, shared),
            ('POST', '/chat/completions', 'openai.chat.completions', chat, shared),
            ('POST', '/embeddings', 'openai.embeddings', self._embed, shared),
            ('POST', '/responses', 'openai.responses', respond, OpenAiErrors(ITEM_PARAMS)),
        )
        routes = [
            Route(path=prefix + path, http_method=verb, name=name, method=SAMPLE_METHOD, serve=serve, errors=errors)
            for prefix in PREFIXES
            for verb, path, name, serve, errors in rows
        ]
        messages = Route(
            path='/v1/messages',
            http_method='POST',
            name='openai.messages',
            method=SAMPLE_METHOD,
            serve=answer,
            errors=MessageErrors(BLOCK_PARAMS),
            credentials=_credentials,
            error_event='error',
        )
        return [*routes, messages]

    async def _list_models(self, call: HttpCall) -> Response:
        call.body_done.set()
        return JsonResponse({'object': 'list', 'data': await self._models.list_all(current_caller())})

    async def _get_model(self, call: HttpCall) -> Response:
        call.body_done.set()
        return JsonResponse(await self._models.show(current_caller(), call.path_values['model']))

    async def _embed(self, call: HttpCall) -> Response:
        request = await read_json(call, embedding_request, limit_bytes=self._body_bytes)
        call.body_done.set()
        model = await self._models.find(current_caller(), request.model)
        if (size := self._hidden_sizes.get(model.base_model)) is not None:
            check_size(request, size)
        async with aclosing(self._samplers.sample_batch(current_caller(), request.to_sampler(model))) as results:
            sizes, reserve = self._hidden_sizes, call.reserve_body
            return EncodedResponse(await embedding_response(request, model, results, sizes=sizes, reserve=reserve))

    async def _generate(
        self,
        read: Callable[[Mapping[str, Any]], GenerationRequest],
        make_writer: Callable[..., Writer],
        call: HttpCall,
        *,
        is_named: bool = False,
    ) -> Response:
        request = await read_json(call, read, limit_bytes=self._body_bytes)
        call.body_done.set()
        model = await self._models.find(current_caller(), request.model)
        reader = ChoiceReader(request, model.base_model, current_caller(), self._tokens)
        created = int(self._clock.now().timestamp())
        writer = make_writer(request, model, usage=reader.usage, created=created)
        deltas = self._deltas(request, model, reader)
        if request.tools is not None:
            deltas = self._with_calls(deltas, request.tools, model)
        if request.is_streamed:
            events = _closing(deltas, writer.chunks(deltas))
            return EventResponse(events, is_named=is_named)
        async with aclosing(deltas):
            return JsonResponse(await writer.complete(deltas))

    async def _deltas(
        self, request: GenerationRequest, model: ResolvedModel, reader: ChoiceReader
    ) -> AsyncGenerator[ChoiceDelta, None]:
        requests = [
            wire.SampleRequest(base_model=model.base_model, adapter=model.adapter, prompt=prompt, params=request.params)
            for prompt in request.prompts
        ]
        async with aclosing(sample_all(self._samplers, current_caller(), requests)) as responses:
            async for response in responses:
                for delta in await reader.read(response):
                    yield delta

    async def _with_calls(
        self, deltas: AsyncGenerator[ChoiceDelta, None], use: ToolUse, model: ResolvedModel
    ) -> AsyncGenerator[ChoiceDelta, None]:
        """Yield the parts with tool calls separated from text; errors name the fields of the request."""
        tool_format = await self._samplers.tool_call_format(model.base_model)
        calls = ToolCallReader(use, tool_format, base_model=model.base_model, tokens=self._tokens)
        async with aclosing(deltas):
            try:
                async for delta in deltas:
                    yield await calls.read(delta, current_caller())
            except DomainError as error:
                raise explained(error, use) from error


def _credentials(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Return the headers with the key in `x-api-key` as a bearer token, unless they already have an authorization."""
    key = headers.get('x-api-key')
    return {'authorization': f'Bearer {key}', **headers} if key else headers


async def _closing(
    deltas: AsyncGenerator[ChoiceDelta, None], chunks: AsyncGenerator[dict[str, Any], None]
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield `chunks`, and close both generators at the end."""
    async with aclosing(deltas), aclosing(chunks):
        async for chunk in chunks:
            yield chunk


def open_openai(
    config: GatewayConfig, samplers: FleetSamplers, runs: Runs, lookups: GrpcLookups, *, clock: Clock
) -> list[Route]:
    models = ModelResolver(samplers, runs=runs, lookups=lookups, started_at=clock.now())
    return OpenAiRoutes(samplers, models, clock=clock, body_bytes=config.http_body_bytes).routes()
