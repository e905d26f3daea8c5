"""Embeddings: the request body of `/v1/embeddings`, the request to the samplers, and the response.

Legend: D hidden size of the model, N number of inputs.
"""

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from twinkle.api.data.v1 import message_pb2
from twinkle.api.sampler.v1 import sampler_service_pb2 as wire
from twinkle.api.sampler.v1 import sampling_pb2
from twinkle_services.gateway.http.validation import JsonModel, not_served, read_model
from twinkle_services.gateway.openai.completion_responses import weight_names
from twinkle_services.gateway.openai.models import ResolvedModel
from twinkle_services.gateway.openai.request import prompts_of
from twinkle_services.kit.errors import Cancelled, InvalidField

MAX_INPUTS = 2048
"""OpenAI's maximum number of inputs of a request."""
MAX_RESPONSE_BYTES = 1 << 25
"""Maximum size of the vectors in a response, in bytes of JSON."""
_INLINE_VALUES = 1 << 14
"""Responses with more numbers are built in a worker thread."""
_VALUE_BYTES = {'float': 24, 'base64': 6}
"""Upper bound for the bytes of JSON of one number, by encoding."""
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
    reserve: Callable[[int], Awaitable[None]],
) -> dict[str, Any]:
    """Return the response to a request after all results have arrived.

    Args:
        request: request of the client.
        model: weights that the request names.
        results: results of the samplers, in any order.
        reserve: reserves memory for a number of bytes, and may raise BytesFull.

    Raises:
        InvalidField: the response would be too large.
        BytesFull: the memory did not become free in time.
        Cancelled: an input was aborted.
    """
    found: dict[int, sampling_pb2.PromptInfo] = {}
    async for result in results:
        if not result.prompt.HasField('embedding'):
            raise Cancelled()
        if not found:
            await reserve(_checked_bytes(request, len(result.prompt.embedding.data) // 4))
        found[result.prompt_index] = result.prompt
    prompts = [found[index] for index in range(len(request.prompts))]
    vectors_ND = unit_vectors([prompt.embedding.data for prompt in prompts])
    if vectors_ND.size > _INLINE_VALUES:
        data = await asyncio.to_thread(_data, vectors_ND, request.encoding)
    else:
        data = _data(vectors_ND, request.encoding)
    token_count = sum(len(prompt.token_ids.data) // 4 for prompt in prompts)
    return {
        'object': 'list',
        'data': data,
        'model': request.model,
        'usage': {'prompt_tokens': token_count, 'total_tokens': token_count},
        'twinkle': {**weight_names(model), 'version': prompts[0].version},
    }


def unit_vectors(embeddings: Sequence[bytes]) -> npt.NDArray[np.float32]:
    """Return float32 [N, D], the embeddings scaled to unit length, as InfoNCE compares them; zeros stay zeros."""
    vectors_ND = np.frombuffer(b''.join(embeddings), '<f4').reshape(len(embeddings), -1).astype(np.float64)
    lengths_N1 = np.linalg.norm(vectors_ND, axis=1, keepdims=True)
    return (vectors_ND / np.where(lengths_N1 == 0, 1, lengths_N1)).astype(np.float32)


def _chat(prompt: sampling_pb2.Prompt) -> sampling_pb2.Prompt:
    """Return a text as a chat with one message of the user.

    Raises:
        InvalidField: the prompt consists of tokens.
    """
    if not prompt.text:
        raise InvalidField('input_role', 'is accepted only with texts, because tokens are not rendered; leave it out')
    message = message_pb2.Message(role=message_pb2.ROLE_USER, parts=[message_pb2.ContentPart(text=prompt.text)])
    return sampling_pb2.Prompt(chat=sampling_pb2.ChatPrompt(trajectory=message_pb2.Trajectory(messages=[message])))


def _checked_bytes(request: EmbeddingRequest, size: int) -> int:
    """Return an upper bound for the bytes of a response with `size` numbers for each input.

    Raises:
        InvalidField: the response would be too large.
    """
    vector_bytes = max(size * _VALUE_BYTES[request.encoding], 1)
    most = MAX_RESPONSE_BYTES // vector_bytes
    if len(request.prompts) > most:
        cure = ' or set encoding_format to "base64"' if request.encoding == 'float' else ''
        raise InvalidField(
            'input', f'must have at most {most} entries for vectors of {size} numbers; send several requests{cure}'
        )
    return vector_bytes * len(request.prompts)


def _data(vectors_ND: npt.NDArray[np.float32], encoding: Literal['float', 'base64']) -> list[dict[str, Any]]:
    if encoding == 'float':
        encoded: list[Any] = vectors_ND.tolist()
    else:
        encoded = [base64.b64encode(vector_D.astype('<f4').tobytes()).decode() for vector_D in vectors_ND]
    return [{'object': 'embedding', 'index': index, 'embedding': vector} for index, vector in enumerate(encoded)]
