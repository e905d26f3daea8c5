"""A request to sample, as native messages. What the samplers here cannot do is refused by name, never passed over."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from services.gateway.http.fields import flag, items, mapping, number, stop_tokens, stops, text, whole
from services.gateway.tinker.fields import Fields, bounded_text
from services.gateway.tinker.paths import WeightsKind, WeightsPath, parse_path
from services.kit.errors import InvalidField
from twinkle.api.sampler.v1 import sampler_service_pb2, sampling_pb2
from twinkle.api.tensor.v1 import tensor_pb2

CLONE_SEQ_IDS = 1_000_000_000
"""Numbers that each copy of a client has for its requests."""
MAX_TOPK = 20
"""Most likely tokens that samplers tell of a place."""
_UNSERVED_CHUNKS = {
    'image': 'pictures are not served here: base models see text alone',
    'image_asset_pointer': 'pictures are not served here: base models see text alone',
    'dmel': 'sound is not served here: base models see text alone',
}
_ANY_INT32 = whole(0, (1 << 31) - 1)
_ANY_INT64 = whole(-(1 << 63), (1 << 63) - 1)
handle_id = bounded_text(1, 256)


@dataclass(frozen=True, kw_only=True)
class SampleAsk:
    """What a client asks for."""

    handle_id: str
    """Empty: the weights are named below."""
    seq_id: int
    """Its place among the requests of the handle; without a handle it means nothing."""
    base_model: str
    model_path: WeightsPath | None
    request: sampler_service_pb2.SampleBatchRequest
    """Without weights."""
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What its answer needs."""

    @property
    def num_samples(self) -> int:
        """How many sequences it is for."""
        return self.request.params.sample_count

    @property
    def tokens(self) -> 'np.ndarray[Any, np.dtype[np.int32]]':
        """The prompt."""
        return np.frombuffer(self.request.prompts[0].token_ids.data, '<i4')

    @property
    def topic(self) -> str:
        """What its end is told under: all requests of one copy of a client have the same."""
        return topic_of(self.handle_id, self.seq_id // CLONE_SEQ_IDS) if self.handle_id else ''


def topic_of(handle: str, clone_id: int) -> str:
    """Return what the ends of the requests of one copy of a client are told under."""
    return f'{handle}/{clone_id}'


def sample_ask(body: Mapping[str, Any]) -> SampleAsk:
    """Return what a body asks for.

    Raises:
        InvalidField: a field is wrong, or asks for what is not served.
    """
    fields = Fields(body)
    _refuse_unserved(fields)
    tokens = prompt_tokens(fields)
    params = sampling_params(fields)
    _read_scores(fields, params, facts := dict[str, Any](), prompt_length=len(tokens))
    handle = fields.get('sampling_session_id', handle_id, '')
    if not handle and 'base_model' not in fields and 'model_path' not in fields:
        raise InvalidField('sampling_session_id', 'is required, unless base_model or model_path is given')
    request = sampler_service_pb2.SampleBatchRequest(params=params)
    request.prompts.add().token_ids.CopyFrom(
        tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_INT32, shape=[len(tokens)], data=tokens.tobytes())
    )
    return SampleAsk(
        handle_id=handle,
        seq_id=fields.need('seq_id', whole(0, (1 << 63) - 1)) if handle else 0,
        base_model=fields.get('base_model', bounded_text(1, 256), ''),
        model_path=sampler_path(fields),
        request=request,
        facts=facts,
    )


def sampler_path(fields: Fields) -> WeightsPath | None:
    """Return the saved weights to sample from; None where none are given.

    Raises:
        InvalidField: they are none that were saved for a sampler.
    """
    if 'model_path' not in fields:
        return None
    path = fields.need('model_path', parse_path)
    if path.kind is not WeightsKind.SAMPLER:
        problem = f'must be tinker://{{run}}/{WeightsKind.SAMPLER}/{{name}}: {path.kind} are not for sampling'
        raise InvalidField('model_path', f'{problem}; save with save_weights_for_sampler')
    return path


def prompt_tokens(fields: Fields) -> 'np.ndarray[Any, np.dtype[np.int32]]':
    """Return the tokens of all chunks, one behind the other.

    Raises:
        InvalidField: there are none, or a chunk is none of tokens.
    """
    found: list[int] = []
    for place, chunk in enumerate(fields.part('prompt').need('chunks', items)):
        path = f'prompt.chunks[{place}]'
        parts = Fields(mapping(chunk, path), path)
        kind = parts.get('type', text, 'encoded_text')
        if kind != 'encoded_text':
            raise InvalidField(f'{path}.type', _UNSERVED_CHUNKS.get(kind, 'must be encoded_text'))
        tokens = parts.need('tokens', items)
        if any(type(token) is not int or not 0 <= token < 1 << 31 for token in tokens):
            raise InvalidField(f'{path}.tokens', 'must hold only integers from 0 to 2147483647')
        found += tokens
    if not found:
        raise InvalidField('prompt.chunks', 'must hold at least one token')
    return np.array(found, '<i4')


def sampling_params(fields: Fields) -> sampling_pb2.SamplingParams:
    """Return how tokens are drawn.

    Raises:
        InvalidField: a field is wrong.
    """
    given = fields.part('sampling_params')
    params = sampling_pb2.SamplingParams(
        temperature=given.get('temperature', number(0, 1e6), 1.0),
        top_k=given.get('top_k', whole(-1, (1 << 31) - 1), -1) or -1,
        top_p=given.get('top_p', number(0, 1, is_least_excluded=True), 1.0),
        sample_count=fields.get('num_samples', whole(1, 128), 1),
    )
    if 'max_tokens' in given:
        params.max_tokens = given.need('max_tokens', whole(1, (1 << 31) - 1))
    if 'seed' in given:
        params.seed = given.need('seed', _ANY_INT64)
    if 'stop' in given:
        given.need('stop', lambda value, path: _read_stops(value, path, params))
    return params


def _read_stops(value: Any, path: str, params: sampling_pb2.SamplingParams) -> None:
    """Read a string, strings or tokens; none at all means that not even the model's own end of sequence stops."""
    if isinstance(value, list) and value and type(value[0]) is int:  # pyright: ignore[reportUnknownArgumentType]
        params.stop_token_ids.extend(stop_tokens(value, path))
    elif value == []:
        params.is_eos_ignored = True
    else:
        params.stop_strings.extend(stops(value, path))


def _read_scores(
    fields: Fields, params: sampling_pb2.SamplingParams, facts: dict[str, Any], *, prompt_length: int
) -> None:
    """Read which log-probabilities are asked for."""
    topk = whole(0, MAX_TOPK)
    params.is_prompt_logprobs_returned = fields.get('prompt_logprobs', flag, default=False)
    if count := fields.get('topk_prompt_logprobs', topk, 0):
        params.prompt_top_logprob_count = count
        facts['is_scored'] = params.is_prompt_logprobs_returned
    if count := fields.get('topk_sample_logprobs', topk, 0):
        params.top_logprob_count = count
    if 'prompt_logprobs_last_n' in fields:
        if not params.is_prompt_logprobs_returned:
            raise InvalidField('prompt_logprobs_last_n', 'needs prompt_logprobs')
        most = max(prompt_length - 1, 1)
        facts['last_n'] = fields.need('prompt_logprobs_last_n', whole(1, most))


def _refuse_unserved(fields: Fields) -> None:
    if 'target_prompt_logprobs' in fields:
        problem = 'samplers here do not score tokens of your choice; ask for topk_prompt_logprobs'
        raise InvalidField('target_prompt_logprobs', problem)
    if fields.get('prompt_alt_tokens_k', _ANY_INT32, 0):
        raise InvalidField('prompt_alt_tokens_k', 'samplers here do not draw other tokens at places of the prompt')
