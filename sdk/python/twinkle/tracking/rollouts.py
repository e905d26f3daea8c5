"""Rollouts in the form in which backends receive them: completions with their prompt, rewards and advantages.

`tracked_rollouts` reads them from results of a sampler, from chats of `twinkle.rollout`, and from features.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from twinkle.data_format import (
    SampledSequence,
    SampleResponse,
    VersionSpan,
    number_array,
    user_data_values,
)

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


@dataclass(frozen=True, kw_only=True)
class TrackedRollout:
    """A completion in a group of a step. An unknown value is empty or None."""

    group_id: str = ''
    """Id of the group within the step."""
    index: int = 0
    """Position in the group."""
    prompt_chat: Mapping[str, Any] | None = None
    """Messages of the prompt, its tools and user data. Media other than paths and URLs are replaced by their kind."""
    prompt_text: str = ''
    prompt_token_ids: npt.NDArray[np.int32] | None = None
    """int32 [P]."""
    completion_messages: Sequence[Mapping[str, Any]] = ()
    completion_text: str = ''
    token_ids: npt.NDArray[np.int32] | None = None
    """int32 [T]. Tokens after the prompt, including tokens that were not sampled."""
    logprobs: npt.NDArray[np.float32] | None = None
    """float32 [T]. Natural log-probability of each token when it was sampled; NaN if unknown."""
    reward: float | None = None
    reward_parts: Mapping[str, float] = field(default_factory=dict[str, float])
    advantage: float | None = None
    token_advantages: npt.NDArray[np.float32] | None = None
    """float32 [T]. Advantage of each token."""
    finish_reason: str = ''
    version_spans: Sequence[VersionSpan] = ()
    """Ranges of `token_ids` with the version that sampled them."""

    def to_json(self) -> dict[str, Any]:
        """Return the known values as JSON values. An unknown log-probability is null.

        `user_data` may still contain values without a JSON form.
        """
        chat: Mapping[str, Any] = self.prompt_chat or {}
        facts = {
            'group_id': self.group_id,
            'index': self.index,
            'reward': self.reward,
            'reward_parts': dict(self.reward_parts),
            'advantage': self.advantage,
            'finish_reason': self.finish_reason,
            'prompt_messages': chat.get('messages'),
            'tools': chat.get('tools'),
            'user_data': user_data_values(chat),
            'prompt_text': self.prompt_text,
            'completion_messages': list(self.completion_messages),
            'completion_text': self.completion_text,
            'prompt_token_ids': _listed(self.prompt_token_ids),
            'token_ids': _listed(self.token_ids),
            'logprobs': _listed(self.logprobs),
            'token_advantages': _listed(self.token_advantages),
            'version_spans': [[span.version, span.begin_token, span.end_token] for span in self.version_spans],
        }
        return {name: value for name, value in facts.items() if value is not None and value not in ('', [], {})}

    @property
    def prompt_preview(self) -> str:
        """Text of the prompt's last message, or of the prompt."""
        messages = (self.prompt_chat or {}).get('messages') or ()
        return _text_of(messages[-1:]) or self.prompt_text

    @property
    def completion_preview(self) -> str:
        """Text of the completion."""
        return self.completion_text or _text_of(self.completion_messages)


def tracked_rollouts(
    trajectories: Any,
    *,
    rewards: Any = None,
    advantages: Any = None,
    reward_parts: Mapping[str, Any] | None = None,
    groups: int | Sequence[str] | None = None,
) -> list[TrackedRollout]:
    """Return the rollouts of completions, in order. The arguments are the same as for `Tracker.log_rollouts`.

    A list that this function returned is accepted too, without other arguments.

    Raises:
        TypeError: A completion has an unknown type.
        ValueError: The number of rewards, advantages or groups is wrong, or a value is not a number.
    """
    listed: list[Any] = [trajectories] if isinstance(trajectories, SampleResponse) else list(trajectories)
    if listed and all(isinstance(item, TrackedRollout) for item in listed):
        if any(value is not None for value in (rewards, advantages, reward_parts, groups)):
            raise ValueError('trajectories: these rollouts have their rewards and groups already; pass them alone')
        return listed
    found = [pair for position, item in enumerate(listed) for pair in _rollouts_of(item, position)]
    rollouts = _grouped([number for number, _ in found], [rollout for _, rollout in found], groups)
    count = len(rollouts)
    if rewards is not None:
        values = _numbers(rewards, 'rewards', count=count)
        rollouts = [replace(rollout, reward=value) for rollout, value in zip(rollouts, values, strict=True)]
    if advantages is not None:
        values = _values(advantages, 'advantages', count=count)
        rollouts = [_with_advantage(rollout, *pair) for rollout, pair in zip(rollouts, enumerate(values), strict=True)]
    parts = {name: _numbers(row, f'reward_parts[{name!r}]', count=count) for name, row in (reward_parts or {}).items()}
    return [
        replace(rollout, reward_parts={name: row[position] for name, row in parts.items()})
        for position, rollout in enumerate(rollouts)
    ]


def rollout_table(rollouts: Sequence[TrackedRollout], *, step: int) -> tuple[list[str], list[list[Any]]]:
    """Return the columns and rows of a table for display: texts, rewards and versions, without tokens."""
    parts = sorted({name for rollout in rollouts for name in rollout.reward_parts})
    columns = ['step', 'group', 'index', 'prompt', 'completion', 'reward', *(f'reward/{name}' for name in parts)]
    rows = [
        [
            *(step, rollout.group_id, rollout.index, rollout.prompt_preview, rollout.completion_preview),
            *(rollout.reward, *(rollout.reward_parts.get(name) for name in parts), rollout.advantage),
            *(None if rollout.token_ids is None else len(rollout.token_ids), rollout.finish_reason),
            *(min((span.version for span in rollout.version_spans), default=None),),
        ]
        for rollout in rollouts
    ]
    return [*columns, 'advantage', 'tokens', 'finish_reason', 'oldest_version'], rows


def _rollouts_of(item: Any, position: int) -> Iterator[tuple[int, TrackedRollout]]:
    """Yield the completions of an item with the number of their group."""
    if isinstance(item, SampleResponse):
        yield from ((position, _sampled(sequence, item.prompt_token_ids)) for sequence in item.sequences)
    elif isinstance(item, SampledSequence):
        yield position, _sampled(item, ())
    elif isinstance(item, FinishedChat):
        yield item.trajectory_index, _finished_chat(item)
    elif isinstance(item, Mapping):
        yield position, _of_feature(cast('Mapping[str, Any]', item))
    elif isinstance(item, list | tuple):
        members = cast('Sequence[Any]', item)
        yield from ((position, rollout) for member in members for _, rollout in _rollouts_of(member, position))
    else:
        raise TypeError(
            f'trajectories[{position}]: expected a result of a sampler, a rollout, a feature, a chat, or a list of'
            f' these, got {type(item).__name__}'
        )


def _grouped(
    numbers: Sequence[int], rollouts: Sequence[TrackedRollout], groups: int | Sequence[str] | None
) -> list[TrackedRollout]:
    """Return the rollouts with the ids of their groups, and their positions within the groups."""
    indices = defaultdict[str, int](int)
    result: list[TrackedRollout] = []
    for group_id, rollout in zip(_group_ids(numbers, groups), rollouts, strict=True):
        result.append(replace(rollout, group_id=group_id, index=indices[group_id]))
        indices[group_id] += 1
    return result


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


def _with_advantage(rollout: TrackedRollout, position: int, value: Any) -> TrackedRollout:
    """Return the rollout with its advantage, or with the advantages of its tokens if the value is a list."""
    if not np.ndim(value):
        return replace(rollout, advantage=_number(value, 'advantages'))
    tokens = number_array(value, np.float32, field=f'advantages[{position}]')
    if rollout.token_ids is not None and len(tokens) != len(rollout.token_ids):
        raise ValueError(
            f'advantages[{position}] must have a value for each of {len(rollout.token_ids)} tokens, got {len(tokens)}'
        )
    return replace(rollout, token_advantages=tokens)


def _sampled(sequence: SampledSequence, prompt_ids: Sequence[int]) -> TrackedRollout:
    feature: Mapping[str, Any] = sequence.new_input_feature or {}
    input_ids: Any = feature.get('input_ids')
    if not len(prompt_ids) and input_ids is not None:
        prompt_ids = input_ids[: len(input_ids) - len(sequence.tokens)]
    has_logprobs = len(sequence.logprobs) == len(sequence.tokens)
    rollout = TrackedRollout(
        prompt_token_ids=np.array(prompt_ids, dtype=np.int32) if len(prompt_ids) else None,
        token_ids=np.array(sequence.tokens, dtype=np.int32),
        logprobs=np.array([row[0][1] for row in sequence.logprobs], dtype=np.float32) if has_logprobs else None,
        completion_text=sequence.decoded,
        finish_reason=str(sequence.stop_reason),
        version_spans=tuple(sequence.version_spans),
    )
    return _with_prompt(rollout, feature, (feature.get('messages') or [])[:-1])


def _finished_chat(chat: FinishedChat) -> TrackedRollout:
    begin, rollout = _with_tokens(TrackedRollout(finish_reason=str(chat.end_reason), reward=chat.reward), chat.feature)
    spans = [
        replace(span, begin_token=span.begin_token - begin, end_token=span.end_token - begin)
        for span in chat.version_spans
        if span.begin_token >= begin
    ]
    turns = [index for index, turn in enumerate(chat.messages) if turn.get('role') == 'assistant']
    first = turns[-chat.turn_count] if 0 < chat.turn_count <= len(turns) else len(chat.messages)
    rollout = _with_prompt(rollout, chat.feature, chat.messages[:first])
    completion = [_loggable(turn) for turn in chat.messages[first:]]
    return replace(rollout, version_spans=spans, completion_messages=completion)


def _of_feature(feature: Mapping[str, Any]) -> TrackedRollout:
    _, rollout = _with_tokens(TrackedRollout(), feature)
    messages: Sequence[Mapping[str, Any]] = feature.get('messages') or ()
    is_answered = bool(messages) and messages[-1].get('role') == 'assistant'
    end = len(messages) - is_answered
    rollout = _with_prompt(rollout, feature, messages[:end])
    return replace(rollout, completion_messages=[_loggable(turn) for turn in messages[end:]])


def _with_tokens(rollout: TrackedRollout, feature: Mapping[str, Any]) -> tuple[int, TrackedRollout]:
    """Return the length of the prompt, and the rollout with its tokens and their log-probabilities."""
    if feature.get('input_ids') is None:
        return 0, rollout
    token_ids = number_array(feature['input_ids'], np.int32, field='input_ids')
    mask = _sampled_mask(feature, len(token_ids))
    begin = int(mask.argmax()) if mask.any() else len(token_ids)
    logprobs = None
    if feature.get('old_logps') is not None and 0 < begin < len(token_ids):
        # The value of a token has the position of its label, one before the token.
        values = number_array(feature['old_logps'], np.float32, field='old_logps')[begin - 1 : -1]
        logprobs = np.where(mask[begin:], values, np.float32(np.nan))
    return begin, replace(rollout, prompt_token_ids=token_ids[:begin], token_ids=token_ids[begin:], logprobs=logprobs)


def _sampled_mask(feature: Mapping[str, Any], length: int) -> npt.NDArray[np.bool_]:
    """Return a mask of the sampled tokens: the tokens of `completion_mask`, or without it, the tokens with a label."""
    mask = np.zeros(length, dtype=bool)
    if feature.get('completion_mask') is not None:
        mask[:] = number_array(feature['completion_mask'], np.int32, field='completion_mask') > 0
    elif feature.get('labels') is not None:
        mask[1:] = number_array(feature['labels'], np.int32, field='labels')[:-1] >= 0
    return mask


def _with_prompt(
    rollout: TrackedRollout, source: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]
) -> TrackedRollout:
    if messages:
        others = {name: source[name] for name in ('tools', 'user_data') if source.get(name)}
        return replace(rollout, prompt_chat={**others, 'messages': [_loggable(turn) for turn in messages]})
    if isinstance(source.get('prompt'), str):
        return replace(rollout, prompt_text=source['prompt'])
    return rollout


def _loggable(turn: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message in which media other than paths and URLs, which may be large, are replaced by their kind."""
    content = turn.get('content')
    if content is None or isinstance(content, str):
        return dict(turn)
    return {**turn, 'content': [_loggable_part(part) for part in content]}


def _loggable_part(part: Any) -> Any:
    if isinstance(part, str) or 'text' in part:
        return part
    for kind in _MEDIA:
        if kind in part and not isinstance(part[kind], str):
            return {'text': f'[{kind}]'}
    return part


def _text_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of each message, one per line."""
    contents = [turn.get('content') or '' for turn in messages]
    parts = [[content] if isinstance(content, str) else content for content in contents]
    return '\n'.join(''.join(part if isinstance(part, str) else part.get('text', '') for part in row) for row in parts)


def _values(values: Any, name: str, *, count: int) -> list[Any]:
    """Return values, which may be a NumPy array or a torch tensor, as a list."""
    if isinstance(values, str | bytes):
        raise ValueError(f'{name}: expected a list of numbers, got {values!r}')
    convert = getattr(values, 'tolist', None)
    listed = list(values if convert is None else convert())
    if len(listed) != count:
        raise ValueError(f'{name} must have a value for each of {count} completions, got {len(listed)}')
    return listed


def _numbers(values: Any, name: str, *, count: int) -> list[float]:
    return [_number(value, name) for value in _values(values, name, count=count)]


def _number(value: Any, name: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f'{name}: expected numbers, got {type(value).__name__}') from error


def _listed(values: npt.NDArray[Any] | None) -> list[Any] | None:
    """Return numbers as JSON values; float32 numbers have no more digits than necessary, and NaN becomes None."""
    if values is None or values.dtype.kind != 'f':
        return None if values is None else values.tolist()
    return [None if value != value else float(str(value)) for value in values]  # noqa: PLR0124 - true for NaN only
