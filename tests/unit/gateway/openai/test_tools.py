"""Conversion of tools: the constraint of a required call preserves the meaning of every schema."""

import itertools
import json
from typing import Any

import jsonschema
import pytest

from twinkle_services.gateway.openai.chat_request import chat_request
from twinkle_services.gateway.openai.tools import explained, forced_output
from twinkle_services.kit.errors import Code, FieldViolation, InvalidField, NotSupportedHere
from twinkle_services.kit.rpc.json_values import dict_from_struct
from twinkle_services.kit.rpc.message_elements import MAX_ELEMENTS
from twinkle_services.kit.rpc.status import ForwardedError

TREE: dict[str, Any] = {
    'type': 'object',
    'properties': {
        'value': {'$ref': '#/$defs/Value'},
        'children': {'type': 'array', 'items': {'$ref': '#'}},
        '$ref': {'const': {'$ref': '#'}},
    },
    'required': ['value'],
    'additionalProperties': False,
    '$defs': {'Value': {'enum': [1, {'$ref': '#/other'}]}},
}
FLAT: dict[str, Any] = {'type': 'object', 'properties': {'value': {'type': 'string'}}, 'required': ['value']}
ARGUMENTS: list[Any] = [
    {},
    {'value': 1},
    {'value': 'a'},
    {'value': {'$ref': '#/other'}},
    {'value': 1, 'children': [{'value': 1}]},
    {'value': 1, 'children': [{'value': 2}]},
    {'value': 1, '$ref': {'$ref': '#'}},
    {'value': 1, 'other': 1},
]


def request_with(**fields: Any) -> Any:
    """Return the request of a chat with the tools `tree`, `flat` and `none`."""
    schemas = {'tree': TREE, 'flat': FLAT}
    tools: list[Any] = [
        {'type': 'function', 'function': {'name': name, 'parameters': schema}} for name, schema in schemas.items()
    ]
    tools.append({'type': 'function', 'function': {'name': 'none'}})
    return chat_request({'model': 'm', 'messages': [{'role': 'user', 'content': 'Hi'}], 'tools': tools, **fields})


def schema_of(request: Any) -> dict[str, Any]:
    """Return the schema that constrains the completion."""
    return dict_from_struct(request.params.structured_output.json_schema)


def is_valid(value: Any, schema: dict[str, Any]) -> bool:
    """Return whether a value satisfies a schema."""
    return jsonschema.Draft202012Validator(schema).is_valid(value)


@pytest.mark.parametrize('is_parallel', [True, False])
def test_required_call_accepts_exactly_the_arguments_of_each_tool(*, is_parallel: bool) -> None:
    """A call satisfies the combined schema exactly if its arguments satisfy the schema of its tool."""
    combined = schema_of(request_with(tool_choice='required', parallel_tool_calls=is_parallel))
    for (name, schema), arguments in itertools.product({'tree': TREE, 'flat': FLAT}.items(), ARGUMENTS):
        call = {'name': name, 'parameters': arguments}
        expected = is_valid(arguments, schema)
        assert is_valid([call] if is_parallel else call, combined) == expected, (name, arguments)
    assert not is_valid([] if is_parallel else {}, combined)
    assert not is_valid([{'name': 'other', 'parameters': {}}] if is_parallel else {'name': 'other'}, combined)


def test_named_call_accepts_one_call_of_its_tool() -> None:
    """A named function accepts one call of this function, even if parallel calls are allowed."""
    choice = {'type': 'function', 'function': {'name': 'flat'}}
    schema = schema_of(request_with(tool_choice=choice, parallel_tool_calls=True))
    assert is_valid({'name': 'flat', 'parameters': {'value': 'a'}}, schema)
    assert not is_valid({'name': 'tree', 'parameters': {'value': 1}}, schema)
    assert not is_valid([{'name': 'flat', 'parameters': {'value': 'a'}}], schema)


def test_prompt_has_tools_unless_they_must_not_be_called() -> None:
    """The prompt has all tools with their schemas, or no tools with the choice `none`; a forced call has no thought."""
    for fields, count in (({}, 3), ({'tool_choice': 'required'}, 3), ({'tool_choice': 'none'}, 0)):
        request = request_with(**fields)
        chat = request.prompts[0].chat
        assert len(chat.trajectory.tools) == count
        assert (request.tools is not None) == (count > 0)
        assert request.params.HasField('structured_output') == ('required' in fields.values())
        assert chat.HasField('is_thinking_enabled') == ('required' in fields.values())
    tool = request_with().prompts[0].chat.trajectory.tools[0]
    assert dict_from_struct(tool.parameters) == TREE
    thinking = request_with(tool_choice='required', chat_template_kwargs={'enable_thinking': True})
    assert thinking.prompts[0].chat.is_thinking_enabled


def test_errors_of_constraints_name_the_choice() -> None:
    """The error for a constraint that the sampler refuses names the field that caused it; others are unchanged."""
    use, free = request_with(tool_choice='required').tools, request_with().tools
    unsupported = NotSupportedHere('structured_output', 'torch')
    violation = FieldViolation('params.structured_output', 'takes too long')
    refused = ForwardedError(Code.INVALID_ARGUMENT, 'INVALID_FIELD', '', {}, (violation,))
    assert [item.field for item in explained(unsupported, use).violations] == ['tool_choice']
    (item,) = explained(refused, use).violations
    assert (item.field, 'takes too long' in item.problem) == ('tools', True)
    for error in (unsupported, refused):
        assert explained(error, free) is error
        assert explained(error, None) is error
    other = InvalidField('messages', 'is wrong')
    assert explained(other, use) is other


def test_constraint_is_part_of_the_serialized_request() -> None:
    """The deepest accepted schema is unchanged by serialization and parsing."""
    schema: dict[str, Any] = {'type': 'string'}
    for _ in range(11):
        schema = {'type': 'object', 'properties': {'a': schema}}
    tool = {'type': 'function', 'function': {'name': 'deep', 'parameters': schema}}
    request = request_with(tools=[tool, {'type': 'function', 'function': {'name': 'b'}}], tool_choice='required')
    params = type(request.params).FromString(request.params.SerializeToString())
    assert params == request.params
    assert json.dumps(schema_of(request)['$defs']['deep']) == json.dumps(dict_sorted(schema))
    assert forced_output(request.tools) == params.structured_output


def dict_sorted(value: Any) -> Any:
    """Return a JSON value whose objects are sorted by name."""
    return {name: dict_sorted(value[name]) for name in sorted(value)} if isinstance(value, dict) else value


def test_chat_with_too_many_values_is_refused() -> None:
    """A chat that samplers would refuse for its number of values is refused before the event loop parses it."""
    function = {'name': 'f', 'parameters': {'enum': [1] * MAX_ELEMENTS}}
    with pytest.raises(InvalidField) as caught:
        request_with(tools=[{'type': 'function', 'function': function}])
    assert caught.value.violations[0].field == 'body'
