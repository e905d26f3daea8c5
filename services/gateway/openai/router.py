"""The routes of OpenAI's API."""

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from services.gateway.http.body import read_json
from services.gateway.http.call import Answer, EventAnswer, HttpCall, JsonAnswer, Route
from services.gateway.openai.answers import AnswerWriter
from services.gateway.openai.asked import Asked
from services.gateway.openai.chat_request import chat_asked
from services.gateway.openai.completion_request import completion_asked
from services.gateway.openai.dialect import OpenAiDialect
from services.gateway.openai.model_names import ModelNames, Weights
from services.gateway.openai.pieces import Piece, PieceReader
from services.gateway.openai.samplers import Samplers, sample_all
from services.gateway.openai.shapes import ChatShape, CompletionShape, Shape
from services.gateway.openai.token_names import TokenNames
from services.kit.clock import Clock
from services.kit.rpc.context import current_caller
from twinkle.api.sampler.v1 import sampler_service_pb2 as wire

SAMPLE_METHOD = '/twinkle.api.sampler.v1.SamplerService/Sample'
"""Whoever may call this may call all of the API."""


class OpenAiRouter:
    """Serves models, completions and chat completions."""

    def __init__(self, samplers: Samplers, models: ModelNames, *, clock: Clock, body_bytes: int) -> None:
        """Sample with `samplers`; bodies may have `body_bytes`."""
        self._samplers = samplers
        self._models = models
        self._names = TokenNames(samplers)
        self._clock = clock
        self._body_bytes = body_bytes

    def routes(self) -> list[Route]:
        """Return the routes."""
        dialect = OpenAiDialect()
        rows = (
            ('GET', '/v1/models', 'openai.models.list', self._list_models),
            ('GET', '/v1/models/{model:path}', 'openai.models.get', self._get_model),
            ('POST', '/v1/completions', 'openai.completions', self._complete),
            ('POST', '/v1/chat/completions', 'openai.chat.completions', self._chat),
        )
        return [
            Route(path=path, http_method=verb, name=name, method=SAMPLE_METHOD, serve=serve, dialect=dialect)
            for verb, path, name, serve in rows
        ]

    async def _list_models(self, call: HttpCall) -> Answer:
        call.body_done.set()
        return JsonAnswer({'object': 'list', 'data': await self._models.list_all(current_caller())})

    async def _get_model(self, call: HttpCall) -> Answer:
        call.body_done.set()
        return JsonAnswer(await self._models.show(current_caller(), call.path_values['model']))

    async def _complete(self, call: HttpCall) -> Answer:
        return await self._answer(call, read=completion_asked, make_shape=CompletionShape)

    async def _chat(self, call: HttpCall) -> Answer:
        return await self._answer(call, read=chat_asked, make_shape=ChatShape)

    async def _answer(
        self, call: HttpCall, *, read: Callable[[Mapping[str, Any]], Asked], make_shape: Callable[[Asked], Shape]
    ) -> Answer:
        asked = await read_json(call, read, limit_bytes=self._body_bytes)
        call.body_done.set()
        weights = await self._models.find(current_caller(), asked.model)
        reader = PieceReader(asked, weights.base_model, current_caller(), self._names)
        created = int(self._clock.now().timestamp())
        writer = AnswerWriter(asked, weights, shape=make_shape(asked), tally=reader.tally, created=created)
        pieces = self._pieces(asked, weights, reader)
        if asked.is_streamed:
            return EventAnswer(_closing(pieces, writer.chunks(pieces)))
        async with aclosing(pieces):
            return JsonAnswer(await writer.whole(pieces))

    async def _pieces(self, asked: Asked, weights: Weights, reader: PieceReader) -> AsyncGenerator[Piece, None]:
        requests = [
            wire.SampleRequest(
                base_model=weights.base_model, adapter=weights.adapter, prompt=prompt, params=asked.params
            )
            for prompt in asked.prompts
        ]
        async with aclosing(sample_all(self._samplers, current_caller(), requests)) as placed_responses:
            async for placed in placed_responses:
                for piece in await reader.read(placed):
                    yield piece


async def _closing(
    pieces: AsyncGenerator[Piece, None], chunks: AsyncGenerator[dict[str, Any], None]
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield `chunks`; at the end, whatever it is, what they are made of is closed."""
    async with aclosing(pieces), aclosing(chunks):
        async for chunk in chunks:
            yield chunk
