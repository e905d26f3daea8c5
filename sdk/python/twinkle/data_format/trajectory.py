"""Chats before tokenization: messages, tools and trajectories."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, TypedDict, cast


class FunctionCall(TypedDict, total=False):
    """A function that the assistant calls."""

    name: str
    arguments: str | dict[str, Any]


class ToolCall(TypedDict, total=False):
    """A tool call in an assistant message."""

    id: str
    type: Literal['function']
    function: FunctionCall


class FunctionSpec(TypedDict, total=False):
    """Description of a function. `parameters` is a JSON schema."""

    name: str
    description: str
    parameters: dict[str, Any]


class Tool(TypedDict, total=False):
    """A tool that the model may call."""

    type: Literal['function']
    function: FunctionSpec


class Message(TypedDict, total=False):
    """A turn of a chat."""

    role: Literal['system', 'user', 'assistant', 'tool']
    type: str
    content: str | list[dict[str, Any]]
    tool_calls: list[ToolCall]
    tool_call_id: str
    reasoning_content: str
    weight: int
    """0: an assistant message without labels. Default: 1."""


class Trajectory(TypedDict, total=False):
    """A chat, with the data that is needed to train on it or to score it."""

    messages: list[Message]
    tools: list[Tool]
    images: list[Any]
    videos: list[Any]
    audios: list[Any]
    prompt: str
    use_chat_template: bool
    """If False, the texts of the messages are concatenated unchanged, and the end-of-sequence token follows a last
    message of the assistant. Default: True."""
    user_data: list[tuple[str, str]]
    """`(key, JSON)` pairs, which `pack_user_data` and `pack_value` create and `user_data_get` reads. A list of mappings
    is also accepted."""


class UserDatum(tuple[str, str]):  # noqa: SLOT001 - a subclass of tuple cannot have slots
    """A `(key, JSON)` pair with a reference to the complete user data.

    User data can be read as pairs, or with `user_data[0].get(key)`; a list of `UserDatum` supports both. In JSON, each
    element is a plain pair.
    """

    _values: Mapping[str, Any]

    def __new__(cls, pair: tuple[str, str], values: Mapping[str, Any]) -> Self:
        """Create the pair `pair` of the user data `values`."""
        made = super().__new__(cls, pair)
        made._values = values
        return made

    def __getnewargs__(self) -> tuple[tuple[str, str], Mapping[str, Any]]:  # pyright: ignore[reportIncompatibleMethodOverride] (that of tuple has one argument)
        return (self[0], self[1]), self._values

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of `key` in the complete user data, or `default`."""
        return self._values.get(key, default)


def pack_value(key: str, value: Any) -> tuple[str, str]:
    """Return a `(key, JSON)` pair for `Trajectory.user_data`.

    Raises:
        TypeError: `value` cannot be serialized to JSON.
    """
    return key, json.dumps(value, ensure_ascii=False)


def pack_user_data(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return `values` as `Trajectory.user_data`, which can be read as pairs or with `get` (see `UserDatum`).

    Raises:
        TypeError: a value cannot be serialized to JSON.
    """
    return [UserDatum(pack_value(key, value), values) for key, value in values.items()]


def user_data_values(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user data of a trajectory or feature by key. If a key is repeated, its first value is returned.

    User data is a list of pairs, as returned by `pack_value`, a list of mappings, or one mapping. The second element of
    a pair is JSON or the value itself.
    """
    given: Any = row.get('user_data')
    values: dict[str, Any] = {}
    for item in cast('Sequence[Any]', given if isinstance(given, Sequence) else [given]):
        if isinstance(item, Mapping):
            found = cast('Mapping[str, Any]', item)
        elif isinstance(item, list | tuple) and len(pair := cast('Sequence[Any]', item)) > 1:
            found = {pair[0]: _unpacked(pair[-1])} if isinstance(pair[0], str) else {}
        else:
            continue
        for name, value in found.items():
            values.setdefault(name, value)
    return values


def user_data_get(row: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """Return the value of `key` in the user data of a trajectory or feature, or `default`."""
    return user_data_values(row).get(key, default)


def _unpacked(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
