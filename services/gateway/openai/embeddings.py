"""Embeddings: the request body of `/v1/embeddings`, the request to the samplers, and the response.

Legend: D hidden size of the model.
"""

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from twinkle.api.data.v1 import message_pb2
from twinkle.api.sampler.v1 import sampler_service_pb2 as wire
from twinkle.api.sampler.v1 import sampling_pb2
from twinkle_services.gateway.http.call import json_bytes
from twinkle_services.gateway.http.validation import JsonModel, not_served, read_model
from twinkle_services.gateway.openai.completion_responses import weight_names
from twinkle_services.gateway.openai.models import ResolvedModel
from twinkle_services.gateway.openai.request import prompts_of
from twinkle_services.kit.errors import Cancelled, InvalidField

MAX_INPUTS = 2048
"""OpenAI's maximum number of inputs of a request."""
MAX_RESPONSE_BYTES = 1 << 23
"""Maximum size of the vectors in a response, in bytes of JSON."""
_VALUE_BYTES = {'float': 24, 'base64': 6}
"""Upper bound for the bytes of JSON of one number, by encoding."""
_MEMORY_BYTES = {'float': 32, 'base64': 16}
"""Upper bound for the memory of one number until the response is sent, by encoding; measured with tracemalloc."""
_ENTRY_BYTES = 512
"""Upper bound for the memory of a vector without its numbers."""
_ENCODED_AT_ONCE = 4
"""Upper bound for the memory of the vector that is being encoded, as a multiple of `_MEMORY_BYTES`."""
_Dimensions = Annotated[None, not_served('is not supported; vectors have the hidden size of the base model')]


class EmbeddingBody(JsonModel):
    """Body of `/v1/embeddings`."""

    model: Annotated[str, Field(min_length=1)]
    input: Any
    """A string, a list of strings, a list of tokens, or a list of such token lists; checked when it is converted."""
    encoding_format: Literal['float', 'base64'] = 'float'
    dimensions: _Dimensions = None
    input_role: Literal['user'] | None = None
    """Role of the chat message that each text becomes, for adapters that were trained with the chat template."""
    user: str = ''
    """Label without effect."""


@dataclass(frozen=True, kw_only=True)
class EmbeddingRequest:
    """Validated request for the embeddings of one or more inputs."""

    model: str
    """Model name as the client sent it."""
    prompts: tuple[sampling_pb2.Prompt, ...]
    encoding: Literal['float', 'base64']

    def to_sampler(self, model: ResolvedModel) -> wire.SampleBatchRequest:
        """Return the request to the samplers: a batch of prompts without new tokens."""
        probe = sampling_pb2.PromptProbe(is_embedding_returned=True)
        return wire.SampleBatchRequest(
            base_model=model.base_model,
            adapter=model.adapter,
            prompts=self.prompts,
            params=sampling_pb2.SamplingParams(max_tokens=0, prompt_probe=probe),
        )


def embedding_request(body: Mapping[str, Any]) -> EmbeddingRequest:
    """Validate and convert a body of `/v1/embeddings`.

    Raises:
        InvalidField: a field is wrong; the error has its path.
    """
    given = read_model(EmbeddingBody, body)
    prompts = prompts_of(given.input, 'input', limit=MAX_INPUTS)
    if given.input_role is not None:
        prompts = tuple(map(_chat, prompts))
    return EmbeddingRequest(model=given.model, prompts=prompts, encoding=given.encoding_format)


async def embedding_response(
    request: EmbeddingRequest,
    model: ResolvedModel,
    results: AsyncIterator[wire.SampleBatchResponse],
    *,
    sizes: dict[str, int],
    reserve: Callable[[int], Awaitable[None]],
) -> list[bytes]:
    """Return the response to a request, as the parts of a JSON document, after all results have arrived.

    `results` may have any order. The hidden size of the base model is added to `sizes`. `reserve` reserves memory for a
    number of bytes.

    Raises:
        InvalidField: the response would be too large.
        BytesFull: the memory did not become free in time.
        Cancelled: an input was aborted.
    """
    vectors: dict[int, bytes] = {}
    token_count = version = 0
    async for result in results:
        if not result.prompt.HasField('embedding'):
            raise Cancelled()
        data = result.prompt.embedding.data
        if not vectors:
            sizes[model.base_model] = len(data) // 4
            check_size(request, len(data) // 4)
            await reserve(_memory_bytes(request, len(data) // 4))
        if result.prompt_index == 0:
            version = result.prompt.version
        vectors[result.prompt_index] = unit_vector(data)
        token_count += len(result.prompt.token_ids.data) // 4
    rest = {
        'object': 'list',
        'model': request.model,
        'usage': {'prompt_tokens': token_count, 'total_tokens': token_count},
        'twinkle': {**weight_names(model), 'version': version},
    }
    ordered = [vectors.pop(index) for index in range(len(request.prompts))]
    return await asyncio.to_thread(_encode, ordered, request.encoding, rest)


def unit_vector(embedding: bytes) -> bytes:
    """Return an embedding scaled to unit length, as InfoNCE compares it; zeros stay zeros. Numbers are `<f4`."""
    vector_D = np.frombuffer(embedding, '<f4').astype(np.float64)
    length = np.linalg.norm(vector_D)
    return (vector_D / (length or 1)).astype('<f4').tobytes()


def check_size(request: EmbeddingRequest, size: int) -> None:
    """Check the size of a response with `size` numbers for each input.

    Raises:
        InvalidField: the response would be too large.
    """
    most = MAX_RESPONSE_BYTES // max(size * _VALUE_BYTES[request.encoding], 1)
    if len(request.prompts) > most:
        cure = ' or set encoding_format to "base64"' if request.encoding == 'float' else ''
        raise InvalidField(
            'input', f'must have at most {most} entries for vectors of {size} numbers; send several requests{cure}'
        )


def _chat(prompt: sampling_pb2.Prompt) -> sampling_pb2.Prompt:
    """Return a text as a chat with one message of the user.

    Raises:
        InvalidField: the prompt consists of tokens.
    """
    if not prompt.text:
        raise InvalidField('input_role', 'is accepted only with strings, because tokens are not rendered; leave it out')
    message = message_pb2.Message(role=message_pb2.ROLE_USER, parts=[message_pb2.ContentPart(text=prompt.text)])
    return sampling_pb2.Prompt(chat=sampling_pb2.ChatPrompt(trajectory=message_pb2.Trajectory(messages=[message])))


def _memory_bytes(request: EmbeddingRequest, size: int) -> int:
    """Return an upper bound for the memory of a response with `size` numbers for each input."""
    count = len(request.prompts)
    return (count + _ENCODED_AT_ONCE) * size * _MEMORY_BYTES[request.encoding] + count * _ENTRY_BYTES


def _encode(vectors: list[bytes], encoding: Literal['float', 'base64'], rest: Mapping[str, Any]) -> list[bytes]:
    """Return the parts of the response; other threads can run after each vector."""
    parts = [b'{"data":[']
    for index, data in enumerate(vectors):
        value = base64.b64encode(data).decode() if encoding == 'base64' else np.frombuffer(data, '<f4').tolist()
        item = json_bytes({'object': 'embedding', 'index': index, 'embedding': value})
        parts.append(b',' + item if index else item)
    return [*parts, b'],', json_bytes(rest)[1:]]
