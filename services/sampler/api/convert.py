"""Converts request messages to domain values, and checks all their fields."""

from collections.abc import Sequence
from datetime import timedelta
from typing import cast

from twinkle.api.sampler.v1 import engine_pb2, sampler_service_pb2, sampling_pb2
from twinkle.api.tensor.v1 import tensor_pb2
from twinkle.data_format import SamplingParams, Trajectory
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.ids import new_id
from twinkle_services.kit.rpc.chats import chat_from_proto
from twinkle_services.kit.rpc.fields import base_model_from_proto, duration_from_proto, id_from_proto
from twinkle_services.kit.rpc.tensors import tensor_from_proto
from twinkle_services.sampler.api.convert_params import MAX_TOP_LOGPROBS, check_range, params_from_proto
from twinkle_services.sampler.application.engine_control import PauseMode
from twinkle_services.sampler.application.prompt_runner import SampleRequest
from twinkle_services.sampler.domain.adapter import DEFAULT_VERSION_WAIT, AdapterChoice
from twinkle_services.sampler.domain.generation import (
    ChatPrompt,
    Prompt,
    SequenceSoFar,
    SleepLevel,
    TextPrompt,
    TokenPrompt,
)

MIN_WATCH_INTERVAL = timedelta(milliseconds=100)
MAX_WATCH_INTERVAL = timedelta(hours=1)
MAX_VERSION_WAIT = timedelta(minutes=10)
MAX_DESCRIBED_TOKENS = 1 << 16

_PAUSE_MODES = {
    engine_pb2.PAUSE_MODE_UNSPECIFIED: PauseMode.KEEP,
    engine_pb2.PAUSE_MODE_KEEP: PauseMode.KEEP,
    engine_pb2.PAUSE_MODE_WAIT: PauseMode.WAIT,
    engine_pb2.PAUSE_MODE_ABORT: PauseMode.ABORT,
}

_SLEEP_LEVELS = {
    engine_pb2.SLEEP_LEVEL_UNSPECIFIED: SleepLevel.WEIGHTS_KEPT,
    engine_pb2.SLEEP_LEVEL_WEIGHTS_KEPT: SleepLevel.WEIGHTS_KEPT,
    engine_pb2.SLEEP_LEVEL_WEIGHTS_DROPPED: SleepLevel.WEIGHTS_DROPPED,
}


def sample_from_proto(request: sampler_service_pb2.SampleRequest) -> SampleRequest:
    """Convert a Sample request.

    Raises:
        InvalidField: A field is missing, malformed or out of range.
    """
    params = params_from_proto(request.params)
    return SampleRequest(
        request_id=_request_id(request.request_id),
        base_model=base_model_from_proto(request.base_model, 'base_model'),
        adapter=choice_from_proto(request.adapter, 'adapter') if request.HasField('adapter') else None,
        prompts=(_prompt(request.prompt, 'prompt'),),
        params=params,
        continued=_continued(request.continued, params.num_samples),
    )


def batch_from_proto(request: sampler_service_pb2.SampleBatchRequest) -> SampleRequest:
    """Convert a SampleBatch request.

    Raises:
        InvalidField: A field is missing, malformed or out of range.
    """
    if not request.prompts:
        raise InvalidField('prompts', 'is empty; give at least one')
    return SampleRequest(
        request_id=_request_id(request.request_id),
        base_model=base_model_from_proto(request.base_model, 'base_model'),
        adapter=choice_from_proto(request.adapter, 'adapter') if request.HasField('adapter') else None,
        prompts=tuple(_prompt(prompt, f'prompts[{index}]') for index, prompt in enumerate(request.prompts)),
        params=params_from_proto(request.params),
    )


def logprobs_from_proto(request: sampler_service_pb2.ComputeLogprobsRequest) -> SampleRequest:
    """Convert a ComputeLogprobs request: the sequences become prompts, and `max_tokens` is 0.

    Raises:
        InvalidField: A field is missing, malformed or out of range.
    """
    if not request.token_ids:
        raise InvalidField('token_ids', 'is empty; give at least one sequence')
    count = request.top_logprob_count if request.HasField('top_logprob_count') else 0
    check_range('top_logprob_count', count, 0, MAX_TOP_LOGPROBS)
    return SampleRequest(
        request_id=new_id('rq'),
        base_model=base_model_from_proto(request.base_model, 'base_model'),
        adapter=choice_from_proto(request.adapter, 'adapter') if request.HasField('adapter') else None,
        prompts=tuple(_tokens(tensor, f'token_ids[{index}]') for index, tensor in enumerate(request.token_ids)),
        params=SamplingParams(max_tokens=0, prompt_logprobs=count),
    )


def choice_from_proto(message: sampling_pb2.AdapterRef, field: str) -> AdapterChoice:
    """Convert a reference to an adapter.

    Raises:
        InvalidField: The adapter id or checkpoint path is missing or malformed, a version is below 1, or the wait is
            out of range.
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
            message.wait_timeout, f'{field}.wait_timeout', minimum=timedelta(), maximum=MAX_VERSION_WAIT
        )
    return AdapterChoice(
        adapter_id=message.adapter_id,
        exact=message.exact if kind == 'exact' else None,
        at_least=message.at_least if kind == 'at_least' else None,
        checkpoint_path=message.checkpoint_path,
        wait=wait,
    )


def required_choice_from_proto(request: sampler_service_pb2.LoadAdapterRequest) -> AdapterChoice:
    """Convert the required adapter of a LoadAdapter request.

    Raises:
        InvalidField: The adapter is missing, or one of its fields is invalid; see `choice_from_proto`.
    """
    if not request.HasField('adapter'):
        raise InvalidField('adapter', 'is missing; name the adapter to load')
    return choice_from_proto(request.adapter, 'adapter')


def pause_mode_from_proto(mode: engine_pb2.PauseMode.ValueType) -> PauseMode:
    """Convert a pause mode; unspecified means KEEP.

    Raises:
        InvalidField: The mode is unknown.
    """
    if mode not in _PAUSE_MODES:
        raise InvalidField('mode', f'{mode} is not a PauseMode; use KEEP, WAIT or ABORT')
    return _PAUSE_MODES[mode]


def sleep_level_from_proto(level: engine_pb2.SleepLevel.ValueType) -> SleepLevel:
    """Convert a sleep level; unspecified means WEIGHTS_KEPT.

    Raises:
        InvalidField: The level is unknown.
    """
    if level not in _SLEEP_LEVELS:
        raise InvalidField('level', f'{level} is not a SleepLevel; use WEIGHTS_KEPT or WEIGHTS_DROPPED')
    return _SLEEP_LEVELS[level]


def interval_from_proto(request: sampler_service_pb2.WatchLoadRequest) -> timedelta:
    """Convert the interval of a WatchLoad request; one second if unset.

    Raises:
        InvalidField: The interval is shorter than 100 ms or longer than an hour.
    """
    if not request.HasField('interval'):
        return timedelta(seconds=1)
    return duration_from_proto(request.interval, 'interval', minimum=MIN_WATCH_INTERVAL, maximum=MAX_WATCH_INTERVAL)


def tokens_from_proto(request: sampler_service_pb2.DescribeTokensRequest) -> tuple[str, tuple[int, ...]]:
    """Return the base model and the tokens of a DescribeTokens request.

    Raises:
        InvalidField: A field is missing or malformed, or the number of tokens is not 1 to MAX_DESCRIBED_TOKENS.
    """
    base_model = base_model_from_proto(request.base_model, 'base_model')
    token_ids = tensor_from_proto(request.token_ids, 'token_ids', dtypes=('int32',), dimensions=1)
    if not 1 <= len(token_ids) <= MAX_DESCRIBED_TOKENS:
        raise InvalidField('token_ids', f'must have 1 to {MAX_DESCRIBED_TOKENS} tokens, got {len(token_ids)}')
    return base_model, tuple(token_ids.tolist())


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
    raise InvalidField(field, 'must contain token_ids, chat or text')


def _continued(entries: Sequence[sampler_service_pb2.SequenceSoFar], sample_count: int) -> tuple[SequenceSoFar, ...]:
    if entries and len(entries) != sample_count:
        raise InvalidField('continued', f'has {len(entries)} entries, must have {sample_count}: one per sequence')
    return tuple(_so_far(entry, index) for index, entry in enumerate(entries))


def _so_far(entry: sampler_service_pb2.SequenceSoFar, index: int) -> SequenceSoFar:
    field = f'continued[{index}]'
    if entry.sequence_index != index:
        raise InvalidField(
            f'{field}.sequence_index',
            f'must be {index}, got {entry.sequence_index}; give one entry per sequence, in order',
        )
    token_ids: tuple[int, ...] = ()
    if entry.HasField('token_ids'):
        array = tensor_from_proto(entry.token_ids, f'{field}.token_ids', dtypes=('int32', 'int64'), dimensions=1)
        token_ids = tuple(array.tolist())
    return SequenceSoFar(sequence_index=index, token_ids=token_ids, is_finished=entry.is_finished)


def _tokens(tensor: tensor_pb2.Tensor, field: str) -> TokenPrompt:
    token_ids = tensor_from_proto(tensor, field, dtypes=('int32', 'int64'), dimensions=1)
    if not len(token_ids):
        raise InvalidField(field, 'is empty; give at least one token')
    return TokenPrompt(tuple(token_ids.tolist()))


def _request_id(value: str) -> str:
    return id_from_proto(value, 'request_id') if value else new_id('rq')
