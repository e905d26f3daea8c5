"""What a client asked for, checked: the parameters that completions and chats share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.gateway.http import fields
from services.gateway.http.fields import Check, flag, mapping, number, text, whole
from services.gateway.openai.response_format import structured_output_of
from services.kit.errors import InvalidField
from twinkle.api.sampler.v1 import sampling_pb2

MAX_CHOICES = 256
"""Most completions of one request, over all its prompts."""
MAX_TOKENS = 2**31 - 1
MAX_TOP_LOGPROBS = 20


def _stream_options(value: Any, field: str) -> dict[str, Any]:
    checks: dict[str, Check] = {'include_usage': flag}
    return fields.read_fields(
        {f'{field}.{name}': item for name, item in mapping(value, field).items()},
        {f'{field}.{name}': check for name, check in checks.items()},
        {},
    )


SHARED_CHECKS: Mapping[str, Check] = {
    'model': text,
    'n': whole(1, 128),
    'temperature': number(0, 2),
    'top_p': number(0, 1, is_least_excluded=True),
    'top_k': whole(-1, MAX_TOKENS),
    'min_p': number(0, 1),
    'presence_penalty': number(-2, 2),
    'frequency_penalty': number(-2, 2),
    'repetition_penalty': number(0, 100, is_least_excluded=True),
    'seed': whole(-(2**63), 2**63 - 1),
    'stop': fields.stops,
    'stop_token_ids': fields.stop_tokens,
    'min_tokens': whole(0, MAX_TOKENS),
    'ignore_eos': flag,
    'response_format': mapping,
    'stream': flag,
    'stream_options': _stream_options,
    'return_token_ids': flag,
    # Labels of the client's own: OpenAI gives them no effect on the answer, and nor does this.
    'user': text,
    'safety_identifier': text,
    'metadata': fields.labels,
    # What is so anyway.
    'store': fields.only(False, 'must be false; answers are not kept'),
    'service_tier': fields.only('auto', 'must be "auto"; there is one tier'),
}
"""Parameters of completions and chats alike."""
SHARED_REFUSED: Mapping[str, str] = {
    'logit_bias': 'is not supported',
    'prompt_cache_key': 'is not supported; prefixes are found by their tokens',
    'prompt_cache_retention': 'is not supported',
}
"""Parameters of the API that are not served."""

_PLAIN = {
    'n': 'sample_count',
    'temperature': 'temperature',
    'top_p': 'top_p',
    'min_p': 'min_p',
    'presence_penalty': 'presence_penalty',
    'frequency_penalty': 'frequency_penalty',
    'repetition_penalty': 'repetition_penalty',
    'seed': 'seed',
    'min_tokens': 'min_tokens',
    'max_tokens': 'max_tokens',
    'ignore_eos': 'is_eos_ignored',
    'stop_token_ids': 'stop_token_ids',
    'stop': 'stop_strings',
}
"""Parameters to fields of `SamplingParams` that mean the same."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request whose fields are good."""

    model: str
    """As the client names it."""
    prompts: tuple[sampling_pb2.Prompt, ...]
    params: sampling_pb2.SamplingParams
    is_streamed: bool
    is_usage_streamed: bool
    """Whether a last event tells the usage."""
    top_logprobs: int | None
    """How many most likely tokens beside each one; None: no log-probabilities at all."""
    are_token_ids_returned: bool
    is_echoed: bool = False
    """Whether each completion begins with its prompt."""

    @property
    def sample_count(self) -> int:
        """Completions of each prompt."""
        return self.params.sample_count if self.params.HasField('sample_count') else 1

    @property
    def choice_count(self) -> int:
        """Completions in all."""
        return self.sample_count * len(self.prompts)


def make_asked(
    values: Mapping[str, Any],
    prompts: tuple[sampling_pb2.Prompt, ...],
    *,
    top_logprobs: int | None,
    is_echoed: bool = False,
) -> Asked:
    """Return the request of checked `values`.

    Raises:
        InvalidField: fields that do not go together.
    """
    if not values.get('model'):
        raise InvalidField('model', 'is required')
    is_streamed = values.get('stream', False)
    if 'stream_options' in values and not is_streamed:
        raise InvalidField('stream_options', 'goes with "stream": true only')
    asked = Asked(
        model=values['model'],
        prompts=prompts,
        params=_params_of(values, top_logprobs=top_logprobs, is_echoed=is_echoed),
        is_streamed=is_streamed,
        is_usage_streamed=values.get('stream_options', {}).get('stream_options.include_usage', False),
        top_logprobs=top_logprobs,
        are_token_ids_returned=values.get('return_token_ids', False),
        is_echoed=is_echoed,
    )
    if asked.choice_count > MAX_CHOICES:
        raise InvalidField('n', f'times the number of prompts must be at most {MAX_CHOICES}')
    return asked


def _params_of(values: Mapping[str, Any], *, top_logprobs: int | None, is_echoed: bool) -> sampling_pb2.SamplingParams:
    plain = {name: values[given] for given, name in _PLAIN.items() if given in values}
    if plain.get('min_tokens', 0) > plain.get('max_tokens', MAX_TOKENS):
        raise InvalidField('min_tokens', 'must be at most the new tokens allowed')
    params = sampling_pb2.SamplingParams(**plain)
    if 'top_k' in values:
        params.top_k = values['top_k'] or -1
    if top_logprobs:
        params.top_logprob_count = top_logprobs
    if is_echoed and top_logprobs is not None:
        params.is_prompt_logprobs_returned = True
        params.prompt_top_logprob_count = top_logprobs
    if form := structured_output_of(values.get('response_format', {'type': 'text'})):
        params.structured_output.CopyFrom(form)
    return params
