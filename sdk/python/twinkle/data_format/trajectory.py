"""Chats before they are tokens: messages, tools, trajectories."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, TypedDict, cast


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
    """`(key, JSON)` pairs: build them with `pack_user_data` or `pack_value`, read them with `user_data_get`. A program
    may give a list of mappings instead."""


class UserDatum(tuple[str, str]):  # noqa: SLOT001 - a tuple has no room for slots
    """A `(key, JSON)` pair that also knows the user data it is of.

    Programs read user data in two ways: as pairs, or by `user_data[0].get(key)`. A list of these serves both. What
    went through JSON is plain pairs again.
    """

    _values: Mapping[str, Any]

    def __new__(cls, pair: tuple[str, str], values: Mapping[str, Any]) -> Self:
        """Make a pair of what `values`, all of the user data, holds."""
        made = super().__new__(cls, pair)
        made._values = values
        return made

    def __getnewargs__(self) -> tuple[tuple[str, str], Mapping[str, Any]]:  # pyright: ignore[reportIncompatibleMethodOverride] (a tuple's own has one argument)
        return (self[0], self[1]), self._values

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value under `key` in all of the user data, else `default`."""
        return self._values.get(key, default)


def pack_value(key: str, value: Any) -> tuple[str, str]:
    """Return a `(key, JSON)` pair for `Trajectory.user_data`.

    Raises:
        TypeError: `value` has no JSON form.
    """
    return key, json.dumps(value, ensure_ascii=False)


def pack_user_data(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return `values` as `Trajectory.user_data`, which can be read in both ways (see `UserDatum`).

    Raises:
        TypeError: a value has no JSON form.
    """
    return [UserDatum(pack_value(key, value), values) for key, value in values.items()]


def user_data_values(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user data of a trajectory or feature by its keys; of a key that is there twice, the first.

    It is a list of pairs, as `pack_value` makes them, a list of mappings, or one mapping. What pairs hold is JSON, or
    the value itself.
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
    """Return the value under `key` in the user data of a trajectory or feature, else `default`."""
    return user_data_values(row).get(key, default)


def _unpacked(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
