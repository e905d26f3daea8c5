"""Tools: functions that a model may call, and the results of calls."""

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
    """JSON schema of an object. The model receives the complete schema, but only `type`, `enum`, `items`, `anyOf`,
    `required` and `additionalProperties` are validated."""
    function: Callable[..., Any]
    """Called with the arguments by name. A result that is not a string is converted to JSON."""

    @classmethod
    def of(cls, function: Callable[..., Any], *, name: str = '', description: str = '') -> 'Tool':
        """Create a tool from a function; schema and description come from its signature and docstring.

        Raises:
            InvalidTool: the name is not an identifier, there is no description, or a parameter has no supported type or
                cannot be passed by name.
        """
        name = name or getattr(function, '__name__', '')
        if not name.isidentifier():
            raise InvalidTool(name or repr(function), 'the name is not an identifier; pass name=')
        description = description or summary_of(function)
        if not description:
            raise InvalidTool(name, 'has no description; add a docstring or pass description=')
        parameters = parameters_of(function, name=name)
        return cls(name=name, description=description, parameters=parameters, function=function)

    @property
    def spec(self) -> ToolSpec:
        """The tool in the format of chat templates."""
        return {
            'type': 'function',
            'function': {'name': self.name, 'description': self.description, 'parameters': self.parameters},
        }


class ToolFailure(StrEnum):
    """Reason why a call failed."""

    UNKNOWN_TOOL = 'unknown_tool'
    """No tool has the requested name."""
    BAD_ARGUMENTS = 'bad_arguments'
    """The arguments are not JSON or do not match the schema."""
    RAISED = 'raised'
    """The function raised an error."""
    TIMEOUT = 'timeout'
    """The function exceeded the timeout. Its thread continues to run, and its result is discarded."""
    BUSY = 'busy'
    """Too many earlier calls that timed out are still running."""


@dataclass(frozen=True, kw_only=True)
class ToolResult:
    """The result of a call."""

    message: Message
    """Message for the model, even after a failure."""
    failure: ToolFailure | None = None
    """Reason for the failure. None: the call succeeded."""
    is_cut: bool = False
    """Whether the text exceeded the maximum length and its middle was removed."""
