"""Converts bodies of completions, and the parameters that chats share, to messages of the sampler contract.

Functions raise InvalidField with the path of the first wrong field.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from pydantic import TypeAdapter

from twinkle.api.sampler.v1 import sampling_pb2
from twinkle_services.gateway.http.validation import TokenIds, read_model, read_value
from twinkle_services.gateway.openai.bodies import MAX_TOKENS, CompletionBody, SamplingBody, SchemaFormat
from twinkle_services.gateway.openai.tools import ToolUse
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.rpc.json_values import struct_of
from twinkle_services.kit.rpc.tensors import tensor_to_proto

MAX_CHOICES = 256
"""Maximum number of completions of a request, summed over its prompts."""
DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for completions."""
_SAMPLING_FIELDS = {
    'n': 'sample_count',
    'temperature': 'temperature',
    'top_p': 'top_p',
    'min_p': 'min_p',
    'presence_penalty': 'presence_penalty',
    'frequency_penalty': 'frequency_penalty',
    'repetition_penalty': 'repetition_penalty',
    'seed': 'seed',
    'min_tokens': 'min_tokens',
    'ignore_eos': 'is_eos_ignored',
    'stop_token_ids': 'stop_token_ids',
    'stop': 'stop_strings',
}
"""Fields of `SamplingParams` by the parameter with the same meaning."""
_TOKEN_IDS = TypeAdapter[Sequence[int]](TokenIds)


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """Validated request for completions of one or more prompts."""

    model: str
    """Model name as the client sent it."""
    prompts: tuple[sampling_pb2.Prompt, ...]
    params: sampling_pb2.SamplingParams
    is_streamed: bool
    is_usage_streamed: bool
    """Whether the last event of a stream reports the usage."""
    top_logprobs: int | None
    """Number of most likely alternatives for each token; None returns no log-probabilities."""
    are_token_ids_returned: bool
    is_echoed: bool = False
    """Whether each completion begins with its prompt."""
    tools: ToolUse | None = None
    """Tools that the model may call; None if calls are not separated from the text."""
    repeated: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields of the body that the response repeats."""

    @property
    def sample_count(self) -> int:
        """Number of completions of each prompt."""
        return self.params.sample_count if self.params.HasField('sample_count') else 1

    @property
    def choice_count(self) -> int:
        """Number of completions of all prompts."""
        return self.sample_count * len(self.prompts)


def completion_request(body: Mapping[str, Any]) -> GenerationRequest:
    """Validate and convert a body of `/v1/completions`."""
    given = read_model(CompletionBody, body)
    max_tokens = max(DEFAULT_MAX_TOKENS, given.min_tokens or 0) if given.max_tokens is None else given.max_tokens
    params = sampling_params(given, max_tokens=max_tokens, top_logprobs=given.logprobs)
    if given.echo and given.logprobs is not None:
        params.is_prompt_logprobs_returned = True
        params.prompt_top_logprob_count = given.logprobs
    prompts = prompts_of(given.prompt, 'prompt', limit=MAX_CHOICES)
    return generation_request(given, prompts, params, top_logprobs=given.logprobs, is_echoed=given.echo)


def generation_request(
    body: SamplingBody,
    prompts: tuple[sampling_pb2.Prompt, ...],
    params: sampling_pb2.SamplingParams,
    *,
    top_logprobs: int | None,
    is_echoed: bool = False,
    tools: ToolUse | None = None,
) -> GenerationRequest:
    """Return the request for completions of `prompts`.

    Raises:
        InvalidField: there are too many completions.
    """
    request = GenerationRequest(
        model=body.model,
        prompts=prompts,
        params=params,
        is_streamed=body.stream,
        is_usage_streamed=body.stream_options is not None and body.stream_options.include_usage,
        top_logprobs=top_logprobs,
        are_token_ids_returned=body.return_token_ids,
        is_echoed=is_echoed,
        tools=tools,
    )
    if request.choice_count > MAX_CHOICES:
        raise InvalidField('n', f'gives {request.choice_count} completions of all prompts; the limit is {MAX_CHOICES}')
    return request


def sampling_params(
    body: SamplingBody, *, max_tokens: int | None, top_logprobs: int | None
) -> sampling_pb2.SamplingParams:
    """Return the sampling parameters of a body.

    Raises:
        InvalidField: `min_tokens` exceeds the maximum, or a schema has a number that is too large.
    """
    if (body.min_tokens or 0) > (MAX_TOKENS if max_tokens is None else max_tokens):
        raise InvalidField('min_tokens', 'must be at most max_tokens or max_completion_tokens')
    given = {field: getattr(body, name) for name, field in _SAMPLING_FIELDS.items()}
    params = sampling_pb2.SamplingParams(max_tokens=max_tokens, **given)
    if body.top_k is not None:
        params.top_k = body.top_k or -1
    if top_logprobs:
        params.top_logprob_count = top_logprobs
    form = body.response_format
    if isinstance(form, SchemaFormat):
        params.structured_output.json_schema.CopyFrom(struct_of(form.json_schema.content))
    elif body.has_format:
        params.structured_output.is_json_object = True
    return params


def prompts_of(value: Any, field: str, *, limit: int) -> tuple[sampling_pb2.Prompt, ...]:
    """Return the prompts of a string, a list of strings, a list of tokens, or a list of token lists.

    Raises:
        InvalidField: the value has a different form, a prompt is empty, or there are too many prompts.
    """
    if isinstance(value, str):
        return (_text_prompt(value, field),)
    if not isinstance(value, list) or not value:
        raise InvalidField(field, 'must be a string, a list of strings, a list of tokens, or a list of token lists')
    items = cast('list[Any]', value)
    if type(items[0]) is int:
        return (_token_prompt(items, field),)
    if len(items) > limit:
        raise InvalidField(field, f'must have at most {limit} prompts, got {len(items)}')
    make = _text_prompt if isinstance(items[0], str) else _token_prompt
    return tuple(make(item, f'{field}[{index}]') for index, item in enumerate(items))


def _text_prompt(value: Any, field: str) -> sampling_pb2.Prompt:
    if not isinstance(value, str) or not value:
        raise InvalidField(field, 'must be a string with at least one character')
    return sampling_pb2.Prompt(text=value)


def _token_prompt(value: Any, field: str) -> sampling_pb2.Prompt:
    tokens = read_value(_TOKEN_IDS, value, field)
    if not tokens:
        raise InvalidField(field, 'must have at least one token')
    return sampling_pb2.Prompt(token_ids=tensor_to_proto(np.asarray(tokens, dtype=np.int32)))
