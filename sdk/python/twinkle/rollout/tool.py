"""Tools: functions that a model may call, what they say of themselves, and what came of a call."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from twinkle.data_format import Message
from twinkle.data_format import Tool as ToolSpec
from twinkle.rollout.errors import InvalidTool
from twinkle.rollout.schema import Schema, parameters_of, summary_of


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function with a name, a description and a schema of its arguments."""

    name: str
    description: str
    parameters: Schema
    """JSON schema of an object. Parts it has beside types, enums, items and anyOf are told, not checked."""
    function: Callable[..., Any]
    """Called with the arguments by name; what it returns becomes text, JSON where it is no text."""

    @classmethod
    def of(cls, function: Callable[..., Any], *, name: str = '', description: str = '') -> 'Tool':
        """Return a function as a tool, schema and description read from signature and docstring.

        Raises:
            InvalidTool: it has no name or no description, or a parameter has no type with a JSON form.
        """
        name = name or getattr(function, '__name__', '')
        if not name.isidentifier():
            raise InvalidTool(name or repr(function), 'has no name a model could call; give name=')
        description = description or summary_of(function)
        if not description:
            raise InvalidTool(name, 'says nothing of itself; give it a docstring or description=')
        parameters = parameters_of(function, name=name)
        return cls(name=name, description=description, parameters=parameters, function=function)

    @property
    def spec(self) -> ToolSpec:
        """The tool as chat templates show it to a model."""
        return {
            'type': 'function',
            'function': {'name': self.name, 'description': self.description, 'parameters': self.parameters},
        }


class ToolFailure(StrEnum):
    """Why a call came to nothing."""

    UNKNOWN_TOOL = 'unknown_tool'
    """No tool has that name."""
    BAD_ARGUMENTS = 'bad_arguments'
    """The arguments do not fit the schema."""
    RAISED = 'raised'
    """The function raised."""
    TIMEOUT = 'timeout'
    """It did not end in time; its thread goes on alone, and what it returns is dropped."""
    BUSY = 'busy'
    """Too many earlier calls that ran out of time still run."""


@dataclass(frozen=True, kw_only=True)
class ToolResult:
    """What came of a call: always a message for the model."""

    message: Message
    failure: ToolFailure | None = None
    is_cut: bool = False
    """Whether the text was longer than allowed and lost its middle."""
