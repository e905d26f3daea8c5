"""Converts sampling parameters, and checks all their fields."""

from typing import Any

from twinkle.api.sampler.v1 import sampling_pb2
from twinkle.data_format import InvalidProbe, PromptProbe, SamplingParams, StructuredOutput
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.rpc.json_values import dict_from_struct
from twinkle_services.kit.rpc.tensors import tensor_from_proto

MAX_SAMPLES = 128
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 64
"""Maximum number of stop strings, and of stop tokens, in one request."""
MAX_STOP_LENGTH = 256
"""Maximum number of characters in a stop string."""
MAX_FORM_LENGTH = 64 << 10
"""Maximum size in bytes of a structured-output message; compiling a larger one takes too much time and memory."""
MAX_REGEX_LENGTH = 8 << 10
"""Maximum number of characters in a regular expression."""
MAX_GRAMMAR_LENGTH = 32 << 10
"""Maximum number of characters in a grammar."""
MAX_CHOICES = 1024
MAX_CHOICE_LENGTH = 4 << 10
"""Maximum number of characters in a choice."""


def params_from_proto(message: sampling_pb2.SamplingParams) -> SamplingParams:
    """Convert the sampling parameters of a request.

    Raises:
        InvalidField: A parameter is out of range or malformed.
    """
    count = message.sample_count if message.HasField('sample_count') else 1
    check_range('params.sample_count', count, 1, MAX_SAMPLES)
    check_range('params.top_logprob_count', message.top_logprob_count, 0, MAX_TOP_LOGPROBS)
    check_range('params.prompt_top_logprob_count', message.prompt_top_logprob_count, 0, MAX_TOP_LOGPROBS)
    is_prompt_scored = message.is_prompt_logprobs_returned or message.prompt_top_logprob_count > 0
    values = {
        'max_tokens': message.max_tokens if message.HasField('max_tokens') else None,
        'min_tokens': message.min_tokens,
        'seed': message.seed if message.HasField('seed') else None,
        'stop': _stops(message),
        'temperature': message.temperature if message.HasField('temperature') else 1.0,
        'top_k': message.top_k if message.HasField('top_k') else -1,
        'top_p': message.top_p if message.HasField('top_p') else 1.0,
        'repetition_penalty': message.repetition_penalty if message.HasField('repetition_penalty') else 1.0,
        'logprobs': message.top_logprob_count,
        'prompt_logprobs': message.prompt_top_logprob_count if is_prompt_scored else None,
        'num_samples': count,
        'ignore_eos': message.is_eos_ignored,
        'min_p': message.min_p,
        'presence_penalty': message.presence_penalty,
        'frequency_penalty': message.frequency_penalty,
        'structured_output': _form(message.structured_output) if message.HasField('structured_output') else None,
        'prompt_probe': _probe(message.prompt_probe) if message.HasField('prompt_probe') else None,
        'return_routed_experts': message.is_routed_experts_returned,
    }
    try:
        return SamplingParams.from_dict(values)
    except ValueError as error:
        # The message begins with the name of the field. Fields whose name differs in the request were checked above.
        raise InvalidField(f'params.{str(error).partition(" ")[0]}', str(error)) from error


def _stops(message: sampling_pb2.SamplingParams) -> tuple[str | int, ...]:
    for name, items in (('stop_strings', message.stop_strings), ('stop_token_ids', message.stop_token_ids)):
        if len(items) > MAX_STOPS:
            raise InvalidField(f'params.{name}', f'has {len(items)} entries; at most {MAX_STOPS} are allowed')
    for index, text in enumerate(message.stop_strings):
        if not 1 <= len(text) <= MAX_STOP_LENGTH:
            raise InvalidField(
                f'params.stop_strings[{index}]', f'must have 1 to {MAX_STOP_LENGTH} characters, got {len(text)}'
            )
    for index, token_id in enumerate(message.stop_token_ids):
        if token_id < 0:
            raise InvalidField(f'params.stop_token_ids[{index}]', f'must be at least 0, got {token_id}')
    return (*message.stop_strings, *message.stop_token_ids)


def check_range(field: str, value: int, minimum: int, maximum: int) -> None:
    """Check that a value is from `minimum` to `maximum`.

    Raises:
        InvalidField: The value is out of range.
    """
    if not minimum <= value <= maximum:
        raise InvalidField(field, f'must be {minimum} to {maximum}, got {value}')


def _form(message: sampling_pb2.StructuredOutput) -> StructuredOutput:
    """Return the form to which the output is constrained. The message must contain exactly one form."""
    field = 'params.structured_output'
    if message.ByteSize() > MAX_FORM_LENGTH:
        raise InvalidField(field, f'must have at most {MAX_FORM_LENGTH} bytes, got {message.ByteSize()}')
    values: dict[str, Any] = {}
    match message.WhichOneof('form'):
        case 'json_schema':
            values['json_schema'] = dict_from_struct(message.json_schema)
        case 'is_json_object':
            values['json_object'] = message.is_json_object
        case 'choices':
            values['choices'] = _choices(message.choices, f'{field}.choices')
        case 'regex' | 'grammar' as kind:
            text = getattr(message, kind)
            _check_length(f'{field}.{kind}', text, MAX_REGEX_LENGTH if kind == 'regex' else MAX_GRAMMAR_LENGTH)
            values[kind] = text
        case _:
            pass
    try:
        return StructuredOutput(**values)
    except ValueError as error:
        raise InvalidField(field, str(error)) from error


def _probe(message: sampling_pb2.PromptProbe) -> PromptProbe:
    targets = None
    if message.HasField('target_token_ids'):
        field = 'params.prompt_probe.target_token_ids'
        targets = tensor_from_proto(message.target_token_ids, field, dtypes=('int32',), dimensions=2)
    try:
        return PromptProbe(
            target_token_ids=targets,
            draw_count=message.draw_count,
            is_embedding_returned=message.is_embedding_returned,
        )
    except InvalidProbe as error:
        raise InvalidField(f'params.{error.field}', error.problem) from error


def _choices(message: sampling_pb2.TextChoices, field: str) -> tuple[str, ...]:
    check_range(f'{field}.texts', len(message.texts), 1, MAX_CHOICES)
    for index, text in enumerate(message.texts):
        if not text:
            raise InvalidField(f'{field}.texts[{index}]', 'must have at least one character')
        _check_length(f'{field}.texts[{index}]', text, MAX_CHOICE_LENGTH)
    return tuple(message.texts)


def _check_length(field: str, text: str, maximum: int) -> None:
    if len(text) > maximum:
        raise InvalidField(field, f'must have at most {maximum} characters, got {len(text)}')
