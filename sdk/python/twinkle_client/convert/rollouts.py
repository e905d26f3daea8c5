"""Conversion of sampled completions, and of rollouts of `twinkle.rollout`, to rollouts that the server stores."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from twinkle.api.gateway.v1 import rollout_service_pb2 as pb
from twinkle.api.sampler.v1 import sampling_pb2
from twinkle.data_format import SampledSequence, SampleResponse, VersionSpan
from twinkle_client.convert.tensors import tensor_to_proto, vector
from twinkle_client.convert.trajectories import trajectory_to_proto

_MEDIA = ('image', 'video', 'audio')


@runtime_checkable
class FinishedChat(Protocol):
    """A chat with tools or an environment, such as `twinkle.rollout.Rollout`."""

    @property
    def feature(self) -> Mapping[str, Any]:
        """All turns as one example, with labels and `old_logps` at sampled tokens."""
        ...

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]:
        """The complete chat."""
        ...

    @property
    def turn_count(self) -> int:
        """Number of turns of the model."""
        ...

    @property
    def end_reason(self) -> str:
        """Reason why the chat ended."""
        ...

    @property
    def reward(self) -> float:
        """Reward of the chat."""
        ...

    @property
    def version_spans(self) -> Sequence[VersionSpan]:
        """Ranges of the feature's tokens with the version that sampled them."""
        ...

    @property
    def trajectory_index(self) -> int:
        """Index of the prompt."""
        ...


def rollouts_with_groups(trajectories: Any, *, groups: int | Sequence[str] | None) -> list[tuple[str, pb.Rollout]]:
    """Return the message of each completion with the id of its group.

    Args:
        trajectories: See `RunRollouts.log`.
        groups: See `RunRollouts.log`.

    Raises:
        TypeError: A completion has an unknown type.
        ValueError: A completion cannot be sent, or `groups` does not match the number of completions.
    """
    listed = [trajectories] if isinstance(trajectories, SampleResponse) else list(trajectories)
    found = [pair for position, item in enumerate(listed) for pair in _rollouts_of(item, position)]
    messages = [message for _, message in found]
    indices = defaultdict[str, int](int)
    group_ids = _group_ids([number for number, _ in found], groups)
    for group_id, message in zip(group_ids, messages, strict=True):
        message.index = indices[group_id]
        indices[group_id] += 1
    return list(zip(group_ids, messages, strict=True))


def set_rewards(messages: Sequence[pb.Rollout], rewards: Any) -> None:
    """Set the reward of each message.

    Raises:
        ValueError: There are not as many values as messages, or a value is not a number.
    """
    for message, value in zip(messages, _listed(rewards, 'rewards', count=len(messages)), strict=True):
        message.reward = _number(value, 'rewards')


def set_parts(messages: Sequence[pb.Rollout], parts: Mapping[str, Any]) -> None:
    """Set the parts of the rewards, whose values are given by name.

    Raises:
        ValueError: There are not as many values as messages, or a value is not a number.
    """
    for name, values in parts.items():
        field = f'reward_parts[{name!r}]'
        for message, value in zip(messages, _listed(values, field, count=len(messages)), strict=True):
            message.reward_parts[name] = _number(value, field)


def set_advantages(messages: Sequence[pb.Rollout], advantages: Any) -> None:
    """Set the advantage of each message, or of each of its tokens if the values are lists.

    Raises:
        ValueError: There are not as many values as messages or tokens, or a value is not a number.
    """
    for position, value in enumerate(_listed(advantages, 'advantages', count=len(messages))):
        message, field = messages[position], f'advantages[{position}]'
        if not np.ndim(value):
            message.advantage = _number(value, 'advantages')
            continue
        tokens = vector(value, np.float32, field=field)
        if message.HasField('token_ids') and len(tokens) != message.token_ids.shape[0]:
            raise ValueError(
                f'{field} must have a value for each of {message.token_ids.shape[0]} tokens, got {len(tokens)}'
            )
        message.token_advantages.CopyFrom(tensor_to_proto(tokens))


def _rollouts_of(item: Any, position: int) -> Iterator[tuple[int, pb.Rollout]]:
    """Yield the completions of an item with the number of their group."""
    if isinstance(item, SampleResponse):
        yield from ((position, _sampled(sequence, item.prompt_token_ids)) for sequence in item.sequences)
    elif isinstance(item, SampledSequence):
        yield position, _sampled(item, ())
    elif isinstance(item, FinishedChat):
        yield item.trajectory_index, _finished_chat(item)
    elif isinstance(item, Mapping):
        yield position, _feature(cast('Mapping[str, Any]', item))
    elif isinstance(item, list | tuple):
        members = cast('Sequence[Any]', item)
        yield from ((position, message) for member in members for _, message in _rollouts_of(member, position))
    else:
        raise TypeError(
            f'trajectories[{position}]: expected a result of a sampler, a rollout, a feature, a chat, or a list of'
            f' these, got {type(item).__name__}'
        )


def _group_ids(numbers: Sequence[int], groups: int | Sequence[str] | None) -> list[str]:
    if groups is None:
        return [f'{number:04}' for number in numbers]
    count = len(numbers)
    if isinstance(groups, int):
        if groups < 1 or count % groups:
            raise ValueError(f'groups: {count} completions cannot be divided into groups of {groups}')
        return [f'{position // groups:04}' for position in range(count)]
    if isinstance(groups, str) or len(groups) != count:
        raise ValueError(f'groups: expected a number, or a list with an id for each of {count} completions')
    return list(groups)


def _sampled(sequence: SampledSequence, prompt_ids: Sequence[int]) -> pb.Rollout:
    message = pb.Rollout(
        token_ids=_tensor(sequence.tokens, np.int32),
        completion_text=sequence.decoded,
        finish_reason=str(sequence.stop_reason),
        version_spans=_spans(sequence.version_spans),
    )
    if len(sequence.logprobs) == len(sequence.tokens):
        message.logprobs.CopyFrom(_tensor([row[0][1] for row in sequence.logprobs], np.float32))
    feature: Mapping[str, Any] = sequence.new_input_feature or {}
    input_ids: Any = feature.get('input_ids')
    if not len(prompt_ids) and input_ids is not None:
        prompt_ids = input_ids[: len(input_ids) - len(sequence.tokens)]
    if len(prompt_ids):
        message.prompt_token_ids.CopyFrom(_tensor(prompt_ids, np.int32))
    _set_prompt(message, feature, (feature.get('messages') or [])[:-1])
    return message


def _finished_chat(chat: FinishedChat) -> pb.Rollout:
    message = pb.Rollout(finish_reason=str(chat.end_reason), reward=chat.reward)
    begin = _set_tokens(message, chat.feature)
    spans = _spans(chat.version_spans, shift=begin)
    message.version_spans.extend(span for span in spans if span.begin_token >= 0)
    turns = [index for index, turn in enumerate(chat.messages) if turn.get('role') == 'assistant']
    first = turns[-chat.turn_count] if 0 < chat.turn_count <= len(turns) else len(chat.messages)
    _set_prompt(message, chat.feature, chat.messages[:first])
    _set_completion(message, chat.messages[first:])
    return message


def _feature(feature: Mapping[str, Any]) -> pb.Rollout:
    message = pb.Rollout()
    _set_tokens(message, feature)
    messages: Sequence[Mapping[str, Any]] = feature.get('messages') or ()
    is_answered = bool(messages) and messages[-1].get('role') == 'assistant'
    end = len(messages) - is_answered
    _set_prompt(message, feature, messages[:end])
    _set_completion(message, messages[end:])
    return message


def _set_tokens(message: pb.Rollout, feature: Mapping[str, Any]) -> int:
    """Set the tokens of a feature and the log-probabilities of its sampled tokens; return the length of the prompt."""
    if feature.get('input_ids') is None:
        return 0
    token_ids = vector(feature['input_ids'], np.int32, field='input_ids')
    mask = _sampled_mask(feature, len(token_ids))
    begin = int(mask.argmax()) if mask.any() else len(token_ids)
    message.prompt_token_ids.CopyFrom(tensor_to_proto(token_ids[:begin]))
    message.token_ids.CopyFrom(tensor_to_proto(token_ids[begin:]))
    if feature.get('old_logps') is not None and 0 < begin < len(token_ids):
        # The value of a token has the position of its label, one before the token.
        logprobs = vector(feature['old_logps'], np.float32, field='old_logps')[begin - 1 : -1]
        message.logprobs.CopyFrom(tensor_to_proto(np.where(mask[begin:], logprobs, np.float32(np.nan))))
    return begin


def _sampled_mask(feature: Mapping[str, Any], length: int) -> npt.NDArray[np.bool_]:
    """Return which tokens were sampled: those of `completion_mask`, otherwise those with a label."""
    mask = np.zeros(length, dtype=bool)
    if feature.get('completion_mask') is not None:
        mask[:] = vector(feature['completion_mask'], np.int32, field='completion_mask') > 0
    elif feature.get('labels') is not None:
        mask[1:] = vector(feature['labels'], np.int32, field='labels')[:-1] >= 0
    return mask


def _set_prompt(message: pb.Rollout, source: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> None:
    if messages:
        others = {name: source[name] for name in ('tools', 'user_data') if source.get(name)}
        message.prompt_chat.CopyFrom(
            trajectory_to_proto({**others, 'messages': [_loggable(turn) for turn in messages]})
        )
    elif isinstance(source.get('prompt'), str):
        message.prompt_text = source['prompt']


def _set_completion(message: pb.Rollout, messages: Sequence[Mapping[str, Any]]) -> None:
    if messages:
        chat = trajectory_to_proto({'messages': [_loggable(turn) for turn in messages]})
        message.completion_messages.extend(chat.messages)


def _loggable(turn: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message in which media without an address are replaced by their kind, because they may be large."""
    content = turn.get('content')
    if content is None or isinstance(content, str):
        return turn
    return {**turn, 'content': [_loggable_part(part) for part in content]}


def _loggable_part(part: Any) -> Any:
    if isinstance(part, str) or 'text' in part:
        return part
    for kind in _MEDIA:
        if kind in part and not isinstance(part[kind], str):
            return {'text': f'[{kind}]'}
    return part


def _spans(spans: Sequence[VersionSpan], *, shift: int = 0) -> list[sampling_pb2.VersionSpan]:
    return [
        sampling_pb2.VersionSpan(
            version=span.version, begin_token=span.begin_token - shift, end_token=span.end_token - shift
        )
        for span in spans
    ]


def _tensor(values: Any, dtype: type[np.int32 | np.float32]) -> Any:
    return tensor_to_proto(np.asarray(values, dtype=dtype))


def _listed(values: Any, field: str, *, count: int) -> list[Any]:
    """Return values as a list, also those of NumPy and torch."""
    if isinstance(values, str | bytes):
        raise ValueError(f'{field}: expected a list of numbers, got {values!r}')
    convert = getattr(values, 'tolist', None)
    listed = list(values if convert is None else convert())
    if len(listed) != count:
        raise ValueError(f'{field} must have a value for each of {count} completions, got {len(listed)}')
    return listed


def _number(value: Any, field: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f'{field}: expected numbers, got {type(value).__name__}') from error
