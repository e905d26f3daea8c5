"""Conversion of sampler events to OpenAI responses: texts, usage and log-probabilities, in bounded memory."""

from collections.abc import AsyncGenerator, Iterable
from typing import Any

import numpy as np
import pytest

from twinkle.api.sampler.v1 import sampler_service_pb2 as wire
from twinkle.api.sampler.v1 import sampling_pb2
from twinkle.api.tensor.v1 import tensor_pb2
from twinkle_services.gateway.openai.choices import ChoiceDelta, ChoiceReader, ScoredToken, TokenText, TokenTexts
from twinkle_services.gateway.openai.completion_responses import MAX_LOGPROBS, CompletionFormat, ResponseWriter
from twinkle_services.gateway.openai.models import ResolvedModel
from twinkle_services.gateway.openai.request import GenerationRequest, completion_request
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import Cancelled, InvalidField
from twinkle_services.kit.rpc.tensors import tensor_to_proto

CALLER = Caller(tenant_id='alice')


class LetterTokens:
    """Fake samplers that use letters as tokens."""

    async def describe_tokens(self, caller: Caller, request: wire.DescribeTokensRequest) -> wire.DescribeTokensResponse:
        del caller
        token_ids = np.frombuffer(request.token_ids.data, '<i4')
        return wire.DescribeTokensResponse(
            tokens=[sampling_pb2.TokenForm(piece=bytes([97 + token % 26])) for token in token_ids]
        )


def request_for(**fields: Any) -> GenerationRequest:
    """Return a validated request."""
    return completion_request({'model': 'm', 'prompt': 'abc', **fields})


def reader_for(request: GenerationRequest) -> ChoiceReader:
    """Return a reader of the response to a request."""
    samplers: Any = LetterTokens()
    return ChoiceReader(request, 'm', CALLER, TokenTexts(samplers))


def ints(values: Iterable[int]) -> tensor_pb2.Tensor:
    """Return a tensor of tokens."""
    return tensor_to_proto(np.asarray(list(values), np.int32))


def floats(values: Iterable[float]) -> tensor_pb2.Tensor:
    """Return a tensor of log-probabilities."""
    return tensor_to_proto(np.asarray(list(values), np.float32))


def prompt_of(token_ids: Iterable[int], **fields: Any) -> wire.SampleResponse:
    """Return the event that reports a prompt."""
    return wire.SampleResponse(prompt=sampling_pb2.PromptInfo(token_ids=ints(token_ids), **fields))


def delta_of(index: int, token_ids: list[int], text: str) -> wire.SampleResponse:
    """Return an event with new tokens."""
    logprobs = floats(-0.5 for _ in token_ids)
    delta = sampling_pb2.TokenDelta(sequence_index=index, token_ids=ints(token_ids), logprobs=logprobs, text=text)
    return wire.SampleResponse(delta=delta)


def end_of(index: int, reason: Any, text: str = '') -> wire.SampleResponse:
    """Return the event that ends a sequence."""
    end = sampling_pb2.SequenceFinished(sequence_index=index, stop_reason=reason, text=text)
    return wire.SampleResponse(finished=end)


async def response_to(request: GenerationRequest, events: list[tuple[int, wire.SampleResponse]]) -> dict[str, Any]:
    """Return the complete response built from sampler events."""
    reader = reader_for(request)

    async def pieces() -> AsyncGenerator[ChoiceDelta, None]:
        for event in events:
            for piece in await reader.read(event):
                yield piece

    writer = ResponseWriter(
        request, ResolvedModel(base_model='m'), form=CompletionFormat, usage=reader.usage, created=1
    )
    return await writer.complete(pieces())


async def test_usage_counts_each_prompt_once_and_every_token() -> None:
    """Usage counts a prompt once for all its choices, and includes tokens that a stop string hides."""
    stop, length = sampling_pb2.STOP_REASON_STOP, sampling_pb2.STOP_REASON_LENGTH
    events = [
        (0, prompt_of([1, 2, 3], cached_token_count=2)),
        (1, prompt_of([4])),
        (0, delta_of(0, [5, 6], 'fg')),
        (0, delta_of(1, [7], '')),
        (0, end_of(1, stop)),
        (1, delta_of(0, [8], 'i')),
        (1, delta_of(1, [9], 'j')),
        (1, end_of(0, length)),
        (1, end_of(1, length)),
        (0, end_of(0, stop, text='!')),
    ]
    response = await response_to(request_for(prompt=['abc', 'd'], n=2), events)
    assert response['usage'] == {
        'prompt_tokens': 4,
        'completion_tokens': 5,
        'total_tokens': 9,
        'prompt_tokens_details': {'cached_tokens': 2},
    }
    assert [choice['text'] for choice in response['choices']] == ['fg!', '', 'i', 'j']
    assert [choice['finish_reason'] for choice in response['choices']] == ['stop', 'stop', 'length', 'length']
    assert [choice['index'] for choice in response['choices']] == [0, 1, 2, 3]


async def test_aborted_sequence_fails_the_call() -> None:
    """An aborted sequence fails the call with Cancelled."""
    events = [(0, prompt_of([1])), (0, end_of(0, sampling_pb2.STOP_REASON_ABORT))]
    with pytest.raises(Cancelled):
        await response_to(request_for(), events)


async def test_echoed_prompt_is_scored_once_for_all_choices() -> None:
    """All choices of an echoed prompt share one list of scores, and later offsets continue after the prompt."""
    request = request_for(n=100, echo=True, logprobs=0)
    reader = reader_for(request)
    prompt = prompt_of([0, 1, 2], logprobs=floats([float('nan'), -1.0, -2.0]))
    pieces = await reader.read((0, prompt))
    assert len(pieces) == 100
    assert {id(piece.scored) for piece in pieces} == {id(pieces[0].scored)}
    assert [token.text_offset for token in pieces[99].scored] == [0, 1, 2]
    for index in (0, 99):
        (piece,) = await reader.read((0, delta_of(index, [4], 'e')))
        assert [token.text_offset for token in piece.scored] == [3]


async def test_complete_response_has_bounded_logprobs() -> None:
    """A response with too many log-probabilities is refused as soon as the limit is exceeded."""
    token = TokenText(b'a', is_special=False)
    scored = [ScoredToken(token, -1.0, [(token, -1.0)] * 19, 0)] * 100
    request = request_for(logprobs=19)
    read = 0

    async def pieces() -> AsyncGenerator[ChoiceDelta, None]:
        nonlocal read
        while True:
            read += 1
            yield ChoiceDelta(index=0, text='a' * 100, token_ids=[1] * 100, scored=scored)

    writer = ResponseWriter(
        request,
        ResolvedModel(base_model='m'),
        form=CompletionFormat,
        usage=reader_for(request).usage,
        created=1,
    )
    with pytest.raises(InvalidField) as caught:
        await writer.complete(pieces())
    assert caught.value.field == 'logprobs'
    assert read == MAX_LOGPROBS // 2000 + 1
