"""The request of `/v1/completions`: prompts, and the parameters that only completions have."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from services.gateway.http.fields import Check, flag, items, read_fields, token_ids, whole
from services.gateway.openai.asked import (
    MAX_CHOICES,
    MAX_TOKENS,
    MAX_TOP_LOGPROBS,
    SHARED_CHECKS,
    SHARED_REFUSED,
    Asked,
    make_asked,
)
from services.kit.errors import InvalidField
from services.kit.rpc.tensors import tensor_to_proto
from twinkle.api.sampler.v1 import sampling_pb2

DEFAULT_MAX_TOKENS = 16
"""As OpenAI has it for completions."""


def _as_it_is(value: Any, field: str) -> Any:
    del field
    return value


_CHECKS: Mapping[str, Check] = {
    **SHARED_CHECKS,
    'prompt': _as_it_is,
    'max_tokens': whole(0, MAX_TOKENS),
    'logprobs': whole(0, MAX_TOP_LOGPROBS),
    'echo': flag,
    'best_of': whole(1, 128),
}
_REFUSED: Mapping[str, str] = {**SHARED_REFUSED, 'suffix': 'is not supported; models here only continue'}


def completion_asked(body: Mapping[str, Any]) -> Asked:
    """Return what a completion asks for.

    Raises:
        InvalidField: names the parameter.
    """
    values = read_fields(body, _CHECKS, _REFUSED)
    if 'best_of' in values and values['best_of'] != values.get('n', 1):
        raise InvalidField('best_of', 'must be equal to n; every completion is returned')
    values.setdefault('max_tokens', max(DEFAULT_MAX_TOKENS, values.get('min_tokens', 0)))
    prompts = _prompts_of(values.get('prompt'))
    is_echoed = values.get('echo', False)
    return make_asked(values, prompts, top_logprobs=values.get('logprobs'), is_echoed=is_echoed)


def _prompts_of(value: Any) -> tuple[sampling_pb2.Prompt, ...]:
    if isinstance(value, str):
        return (_text_prompt(value, 'prompt'),)
    if not isinstance(value, list) or not value:
        raise InvalidField('prompt', 'must be a string, a list of strings, of tokens, or of lists of tokens')
    prompts = items(value, 'prompt')
    if type(prompts[0]) is int:
        return (_token_prompt(prompts, 'prompt'),)
    if len(prompts) > MAX_CHOICES:
        raise InvalidField('prompt', f'must have at most {MAX_CHOICES} prompts')
    make = _text_prompt if isinstance(prompts[0], str) else _token_prompt
    return tuple(make(item, f'prompt[{place}]') for place, item in enumerate(prompts))


def _text_prompt(value: Any, field: str) -> sampling_pb2.Prompt:
    if not isinstance(value, str) or not value:
        raise InvalidField(field, 'must be a string with at least one character')
    return sampling_pb2.Prompt(text=value)


def _token_prompt(value: Any, field: str) -> sampling_pb2.Prompt:
    tokens: Sequence[int] = token_ids(value, field)
    if not tokens:
        raise InvalidField(field, 'must have at least one token')
    return sampling_pb2.Prompt(token_ids=tensor_to_proto(np.asarray(tokens, dtype=np.int32)))
