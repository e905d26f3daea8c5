"""Tools of a request: definitions, their form in the prompt, and the schema of a completion that must call them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, cast

from pydantic import AfterValidator, Field

from twinkle.api.data.v1 import message_pb2
from twinkle.api.sampler.v1 import sampling_pb2
from twinkle.data_format import FunctionSpec, Tool
from twinkle_services.gateway.http.call import json_bytes
from twinkle_services.gateway.http.validation import JsonModel
from twinkle_services.gateway.openai.bodies import MAX_SCHEMA_BYTES, shallow
from twinkle_services.kit.errors import DomainError, InvalidField
from twinkle_services.kit.rpc.json_values import struct_of

MAX_TOOLS = 128
MAX_FORCED_CALLS = 16
"""Maximum number of calls in a completion that must call tools; without a limit, a model might not end the list."""
_DATA_KEYWORDS = {'const', 'default', 'enum', 'examples'}
"""Keywords whose values are data, and not schemas."""
_NAME = re.compile(r'[A-Za-z0-9_-]{1,64}')
_Tool = TypeVar('_Tool')


def _arguments_schema(value: dict[str, Any]) -> dict[str, Any]:
    if shallow(value).get('type', 'object') != 'object':
        raise ValueError('must have the type "object"')
    return value


def _tool_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError('must have 1 to 64 letters, digits, underscores or hyphens')
    return name


ParametersSchema = Annotated[dict[str, Any], AfterValidator(_arguments_schema)]
"""JSON schema of the arguments of a function."""
ToolName = Annotated[str, AfterValidator(_tool_name)]
ToolList = Annotated[list[_Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class FunctionDefinition(JsonModel):
    """Function that the model may call."""

    name: ToolName
    description: str = ''
    parameters: ParametersSchema = Field(default_factory=dict[str, Any])
    """JSON schema of the arguments; empty for a function without parameters."""
    strict: bool = False
    """Accepted without effect: arguments are constrained if, and only if, the request requires a call."""


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """Tools that a model may call, or must call."""

    tools: tuple[Tool, ...]
    """All tools of the prompt."""
    names: frozenset[str]
    """Names of the tools that may be called."""
    is_forced: bool
    """Whether the completion is constrained to JSON with calls."""
    is_parallel: bool
    """Whether a completion may contain several calls."""


@dataclass(frozen=True, kw_only=True)
class ToolFields:
    """Paths of the fields of tools in the bodies of one API, for errors."""

    tool_name: str
    """Path of the name of a tool, with the placeholder `{index}`."""
    chosen_name: str
    """Path of the name of the function that must be called."""
    output_format: str


CHAT_FIELDS = ToolFields(
    tool_name='tools[{index}].function.name', chosen_name='tool_choice.function.name', output_format='response_format'
)


def tool_use(
    functions: Sequence[FunctionDefinition],
    choice: str,
    *,
    chosen_name: str = '',
    is_parallel: bool,
    has_format: bool,
    fields: ToolFields = CHAT_FIELDS,
) -> ToolUse | None:
    """Return the tools of a chat; None if the model must not call any.

    Args:
        functions: functions that the model may call.
        choice: 'none', 'auto' or 'required'; 'function' if the model must call the function `chosen_name`.
        chosen_name: name of the function that must be called.
        is_parallel: whether several calls are allowed.
        has_format: whether the completion must have a format other than text.
        fields: paths of the fields, for errors.

    Raises:
        InvalidField: a name occurs twice or is not among the functions, or the parameters contradict each other.
    """
    names: set[str] = set()
    for index, function in enumerate(functions):
        if function.name in names:
            raise InvalidField(fields.tool_name.format(index=index), 'occurs twice; give each tool another name')
        names.add(function.name)
    if choice in {'required', 'function'} and not names:
        raise InvalidField('tool_choice', 'requires tools; give at least one, or use "auto" or "none"')
    if choice == 'function' and chosen_name not in names:
        raise InvalidField(fields.chosen_name, f'must be one of the tools: {", ".join(sorted(names))}')
    if not names or choice == 'none':
        return None
    if has_format:
        problem = 'cannot be combined with tools; use "tool_choice": "none", or leave out one of them'
        raise InvalidField(fields.output_format, problem)
    return ToolUse(
        tools=tuple(Tool(type='function', function=_spec(function)) for function in functions),
        names=frozenset({chosen_name} if choice == 'function' else names),
        is_forced=choice != 'auto',
        is_parallel=is_parallel and choice != 'function',
    )


def prompt_tools(use: ToolUse) -> list[message_pb2.Tool]:
    """Return the messages of the tools, which the chat template renders."""
    return [
        message_pb2.Tool(name=spec['name'], description=spec['description'], parameters=struct_of(spec['parameters']))
        for spec in map(_spec_of, use.tools)
    ]


def forced_output(use: ToolUse) -> sampling_pb2.StructuredOutput:
    """Return the form of a completion that must call tools.

    Raises:
        InvalidField: the schemas are too large.
    """
    # Llama's templates use the name `parameters`. Structs are sorted by name, so `parameters` comes after `name`.
    specs = [spec for spec in map(_spec_of, use.tools) if spec['name'] in use.names]
    calls = [
        {
            'type': 'object',
            'properties': {'name': {'const': spec['name']}, 'parameters': {'$ref': f'#/$defs/{spec["name"]}'}},
            'required': ['name', 'parameters'],
            'additionalProperties': False,
        }
        for spec in specs
    ]
    call = calls[0] if len(calls) == 1 else {'anyOf': calls}
    root = {'type': 'array', 'items': call, 'minItems': 1, 'maxItems': MAX_FORCED_CALLS} if use.is_parallel else call
    definitions = {spec['name']: _moved(spec['parameters'], f'#/$defs/{spec["name"]}') for spec in specs}
    schema = {**root, '$defs': definitions}
    if len(json_bytes(schema)) > MAX_SCHEMA_BYTES:
        problem = f'have schemas of more than {MAX_SCHEMA_BYTES} bytes; give fewer tools, or use "tool_choice": "auto"'
        raise InvalidField('tools', problem)
    return sampling_pb2.StructuredOutput(json_schema=struct_of(schema))


def explained(error: DomainError, use: ToolUse | None) -> DomainError:
    """Return a sampler's error; an error about the required output becomes one about `tools` or `tool_choice`."""
    if use is None or not use.is_forced:
        return error
    if error.reason == 'NOT_SUPPORTED_HERE':
        problem = 'requires samplers with vLLM for this base model; use "auto" or "none"'
        return InvalidField('tool_choice', problem)
    if error.violations and 'structured_output' in error.violations[0].field:
        return InvalidField('tools', f'cannot be enforced: {error.violations[0].problem}; or use "tool_choice": "auto"')
    return error


def _spec(function: FunctionDefinition) -> FunctionSpec:
    parameters: dict[str, Any] = {'type': 'object', 'properties': {}, **function.parameters}
    return FunctionSpec(name=function.name, description=function.description, parameters=parameters)


def _spec_of(tool: Tool) -> Mapping[str, Any]:
    return cast('Mapping[str, Any]', tool.get('function', {}))


def _moved(schema: Any, root: str, *, is_data: bool = False) -> Any:
    """Return a schema whose references to its own root, `#`, refer to `root`."""
    if isinstance(schema, Mapping):
        fields = cast('Mapping[str, Any]', schema)
        return {name: _moved_field(name, value, root, is_data=is_data) for name, value in fields.items()}
    if isinstance(schema, list):
        return [_moved(item, root, is_data=is_data) for item in cast('Sequence[Any]', schema)]
    return schema


def _moved_field(name: str, value: Any, root: str, *, is_data: bool) -> Any:
    if name == '$ref' and isinstance(value, str) and value.startswith('#') and not is_data:
        return root + value[1:]
    return _moved(value, root, is_data=is_data or name in _DATA_KEYWORDS)
