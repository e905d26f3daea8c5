"""Chats before they are tokens: messages, tools, trajectories."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypedDict


class FunctionCall(TypedDict, total=False):
    """The function an assistant asks to run."""

    name: str
    arguments: str | dict[str, Any]


class ToolCall(TypedDict, total=False):
    """One call an assistant message makes."""

    id: str
    type: Literal['function']
    function: FunctionCall


class FunctionSpec(TypedDict, total=False):
    """What a tool offers; `parameters` is a JSON schema."""

    name: str
    description: str
    parameters: dict[str, Any]


class Tool(TypedDict, total=False):
    """A tool the model may call."""

    type: Literal['function']
    function: FunctionSpec


class Message(TypedDict, total=False):
    """One turn of a chat."""

    role: Literal['system', 'user', 'assistant', 'tool']
    type: str
    content: str | list[dict[str, Any]]
    tool_calls: list[ToolCall]
    tool_call_id: str
    reasoning_content: str


class Trajectory(TypedDict, total=False):
    """A chat with everything needed to train on it or to score it."""

    messages: list[Message]
    tools: list[Tool]
    images: list[Any]
    videos: list[Any]
    audios: list[Any]
    prompt: str
    user_data: list[tuple[str, str]]
    """`(key, JSON)` pairs; build them with `pack_value`, read them with `user_data_get`."""


def pack_value(key: str, value: Any) -> tuple[str, str]:
    """Return a `(key, JSON)` pair for `Trajectory.user_data`.

    Raises:
        TypeError: `value` has no JSON form.
    """
    return key, json.dumps(value, ensure_ascii=False)


def user_data_get(row: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """Return the value packed under `key` in a trajectory or feature, else `default`."""
    pairs: Iterable[Any] = row.get('user_data') or ()
    for pair in pairs:
        if pair[0] == key:
            return json.loads(pair[1])
    return default
