"""Conversion of the arguments of `Sampler.sample` to features and sampling parameters."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

import numpy as np

from twinkle.data_format import InputFeature, SamplingParams, Trajectory
from twinkle.processor import MEDIA_NAMES
from twinkle.sampler.base import SamplerInput
from twinkle.sampler.errors import InvalidPrompt


def split_inputs(inputs: SamplerInput | Sequence[SamplerInput]) -> list[SamplerInput]:
    """Return a single input or a list of inputs as a list.

    Raises:
        ValueError: the list is empty.
    """
    if isinstance(inputs, Mapping) or _is_tokens(inputs):
        return [inputs]
    items = list(inputs)
    if not items:
        raise ValueError('inputs is empty; pass at least one chat, feature or list of token ids')
    return items


def prompt_feature(item: Any, encode: Callable[[Trajectory], InputFeature]) -> InputFeature:
    """Convert an input to a feature with `input_ids`.

    Args:
        item: a chat, a feature or token ids.
        encode: converts a chat to tokens.

    Raises:
        ValueError: the item is not a chat, a feature or token ids; or `encode` refused the chat.
    """
    if isinstance(item, Mapping):
        if 'input_ids' in item:
            return InputFeature(**item)
        if 'messages' in item:
            return encode(item)
    elif _is_tokens(item):
        return InputFeature(input_ids=[int(token_id) for token_id in item])
    raise ValueError(
        f'an input must be a chat with messages, a feature with input_ids or a list of token ids, got {item!r}'
    )


def refuse_media(feature: InputFeature) -> None:
    """Refuse a prompt with images, videos or audio.

    Raises:
        InvalidPrompt: the prompt has media. The message names the field.
    """
    for name in MEDIA_NAMES:
        if feature.get(name) is not None:
            raise InvalidPrompt(f'{name} is set, but this engine supports text only; use the torch engine for media')


def _is_tokens(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and value.dtype.kind in 'iu'
    return isinstance(value, Sequence) and bool(value) and isinstance(value[0], Integral)


def sampling_params_of(given: SamplingParams | Mapping[str, Any] | None, num_samples: int | None) -> SamplingParams:
    """Return the sampling parameters of a call. With `max_tokens` 0, log-probabilities of the prompt are enabled.

    Raises:
        ValueError: a key is not a parameter, or a value is out of range.
    """
    params = given if isinstance(given, SamplingParams) else SamplingParams.from_dict(given or {})
    if params.max_tokens == 0 and params.prompt_logprobs is None:
        params = replace(params, prompt_logprobs=0)
    return params if num_samples is None else replace(params, num_samples=num_samples)
