"""Requests as values, with every check of their fields."""

from datetime import timedelta
from typing import cast

from services.kit.errors import InvalidField
from services.kit.ids import new_id
from services.kit.rpc.chats import chat_from_proto
from services.kit.rpc.fields import duration_from_proto, id_from_proto
from services.kit.rpc.tensors import tensor_from_proto
from services.sampler.application.generate import SampleCommand
from services.sampler.application.pause import PauseMode
from services.sampler.domain.adapter import DEFAULT_VERSION_WAIT, AdapterChoice
from services.sampler.domain.generation import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from twinkle.api.sampler.v1 import sampler_service_pb2, sampling_pb2
from twinkle.api.tensor.v1 import tensor_pb2
from twinkle.data_format import SamplingParams, Trajectory

MAX_SAMPLES = 128
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 64
"""Stop strings, and stop tokens, of one request."""
MAX_STOP_LENGTH = 256
"""Characters of a stop string."""
MIN_WATCH_INTERVAL = timedelta(milliseconds=100)
MAX_WATCH_INTERVAL = timedelta(hours=1)
MAX_VERSION_WAIT = timedelta(minutes=10)

_PAUSE_MODES = {
    sampler_service_pb2.PAUSE_MODE_UNSPECIFIED: PauseMode.KEEP,
    sampler_service_pb2.PAUSE_MODE_KEEP: PauseMode.KEEP,
    sampler_service_pb2.PAUSE_MODE_WAIT: PauseMode.WAIT,
    sampler_service_pb2.PAUSE_MODE_ABORT: PauseMode.ABORT,
}


def sample_from_proto(request: sampler_service_pb2.SampleRequest) -> SampleCommand:
    """Return the command of a Sample.

    Raises:
        InvalidField: names the field.
    """
    return SampleCommand(
        request_id=_request_id(request.request_id),
        base_model=id_from_proto(request.base_model, 'base_model'),
        adapter=choice_from_proto(request.adapter, 'adapter') if request.HasField('adapter') else None,
        prompts=(_prompt(request.prompt, 'prompt'),),
        params=_params(request.params),
    )


def batch_from_proto(request: sampler_service_pb2.SampleBatchRequest) -> SampleCommand:
    """Return the command of a SampleBatch.

    Raises:
        InvalidField: names the field.
    """
    if not request.prompts:
        raise InvalidField('prompts', 'is empty; give at least one')
    return SampleCommand(
        request_id=_request_id(request.request_id),
        base_model=id_from_proto(request.base_model, 'base_model'),
        adapter=choice_from_proto(request.adapter, 'adapter') if request.HasField('adapter') else None,
        prompts=tuple(_prompt(prompt, f'prompts[{index}]') for index, prompt in enumerate(request.prompts)),
        params=_params(request.params),
    )


def logprobs_from_proto(request: sampler_service_pb2.ComputeLogprobsRequest) -> SampleCommand:
    """Return the command of a ComputeLogprobs: prompts to be scored, nothing to be drawn.

    Raises:
        InvalidField: names the field.
    """
    if not request.token_ids:
        raise InvalidField('token_ids', 'is empty; give at least one sequence')
    count = request.top_logprob_count if request.HasField('top_logprob_count') else 0
    _check_range('top_logprob_count', count, 0, MAX_TOP_LOGPROBS)
    return SampleCommand(
        request_id=new_id('rq'),
        base_model=id_from_proto(request.base_model, 'base_model'),
        adapter=choice_from_proto(request.adapter, 'adapter') if request.HasField('adapter') else None,
        prompts=tuple(_tokens(tensor, f'token_ids[{index}]') for index, tensor in enumerate(request.token_ids)),
        params=SamplingParams(max_tokens=0, prompt_logprobs=count),
    )


def choice_from_proto(message: sampling_pb2.AdapterRef, field: str) -> AdapterChoice:
    """Return which weights are asked for.

    Raises:
        InvalidField: nothing is named, a version is below 1, or the wait is out of range.
    """
    kind = message.WhichOneof('version')
    if kind == 'checkpoint_path':
        id_from_proto(message.checkpoint_path, f'{field}.checkpoint_path')
    else:
        id_from_proto(message.adapter_id, f'{field}.adapter_id')
    if kind in ('exact', 'at_least') and getattr(message, kind) < 1:
        raise InvalidField(f'{field}.{kind}', f'must be at least 1, got {getattr(message, kind)}')
    wait = DEFAULT_VERSION_WAIT
    if message.HasField('wait_timeout'):
        wait = duration_from_proto(
            message.wait_timeout, f'{field}.wait_timeout', least=timedelta(), most=MAX_VERSION_WAIT
        )
    return AdapterChoice(
        adapter_id=message.adapter_id,
        exact=message.exact if kind == 'exact' else None,
        at_least=message.at_least if kind == 'at_least' else None,
        checkpoint_path=message.checkpoint_path,
        wait=wait,
    )


def required_choice_from_proto(request: sampler_service_pb2.LoadAdapterRequest) -> AdapterChoice:
    """Return what is to be loaded.

    Raises:
        InvalidField: names the field.
    """
    if not request.HasField('adapter'):
        raise InvalidField('adapter', 'is missing; name the adapter to load')
    return choice_from_proto(request.adapter, 'adapter')


def pause_mode_from_proto(mode: sampler_service_pb2.PauseMode.ValueType) -> PauseMode:
    """Return what becomes of running requests.

    Raises:
        InvalidField: the contract has no such mode.
    """
    if mode not in _PAUSE_MODES:
        raise InvalidField('mode', f'{mode} is no PauseMode')
    return _PAUSE_MODES[mode]


def interval_from_proto(request: sampler_service_pb2.WatchLoadRequest) -> timedelta:
    """Return how often the load is to be told.

    Raises:
        InvalidField: more often than every 100 ms, or less than every hour.
    """
    if not request.HasField('interval'):
        return timedelta(seconds=1)
    return duration_from_proto(request.interval, 'interval', least=MIN_WATCH_INTERVAL, most=MAX_WATCH_INTERVAL)


def _params(message: sampling_pb2.SamplingParams) -> SamplingParams:
    count = message.sample_count if message.HasField('sample_count') else 1
    _check_range('params.sample_count', count, 1, MAX_SAMPLES)
    _check_range('params.top_logprob_count', message.top_logprob_count, 0, MAX_TOP_LOGPROBS)
    _check_range('params.prompt_top_logprob_count', message.prompt_top_logprob_count, 0, MAX_TOP_LOGPROBS)
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
    }
    try:
        return SamplingParams.from_dict(values)
    except ValueError as error:
        # The value's own message begins with the field, which has the same name here.
        raise InvalidField(f'params.{str(error).partition(" ")[0]}', str(error)) from error


def _stops(message: sampling_pb2.SamplingParams) -> tuple[str | int, ...]:
    for name, items in (('stop_strings', message.stop_strings), ('stop_token_ids', message.stop_token_ids)):
        if len(items) > MAX_STOPS:
            raise InvalidField(f'params.{name}', f'has {len(items)} entries, at most {MAX_STOPS} are allowed')
    for index, text in enumerate(message.stop_strings):
        if not 1 <= len(text) <= MAX_STOP_LENGTH:
            raise InvalidField(f'params.stop_strings[{index}]', f'must have 1 to {MAX_STOP_LENGTH} characters')
    for index, token_id in enumerate(message.stop_token_ids):
        if token_id < 0:
            raise InvalidField(f'params.stop_token_ids[{index}]', f'must be at least 0, got {token_id}')
    return (*message.stop_strings, *message.stop_token_ids)


def _prompt(message: sampling_pb2.Prompt, field: str) -> Prompt:
    kind = message.WhichOneof('content')
    if kind == 'token_ids':
        return _tokens(message.token_ids, f'{field}.token_ids')
    if kind == 'text':
        if not message.text:
            raise InvalidField(f'{field}.text', 'must have at least one character')
        return TextPrompt(message.text)
    if kind == 'chat':
        chat = message.chat
        return ChatPrompt(
            trajectory=cast(Trajectory, chat_from_proto(chat.trajectory, f'{field}.chat.trajectory')),
            is_thinking_enabled=chat.is_thinking_enabled if chat.HasField('is_thinking_enabled') else True,
        )
    raise InvalidField(field, 'must hold token_ids, chat or text')


def _tokens(tensor: tensor_pb2.Tensor, field: str) -> TokenPrompt:
    token_ids = tensor_from_proto(tensor, field, dtypes=('int32', 'int64'), dimensions=1)
    if not len(token_ids):
        raise InvalidField(field, 'is empty; give at least one token')
    return TokenPrompt(tuple(token_ids.tolist()))


def _request_id(value: str) -> str:
    return id_from_proto(value, 'request_id') if value else new_id('rq')


def _check_range(field: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise InvalidField(field, f'must be {least} to {most}, got {value}')
