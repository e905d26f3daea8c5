"""Converts bodies of `/v1/responses`, whose input consists of items, to requests for chats."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import BeforeValidator, Field, TypeAdapter

from twinkle.api.data.v1 import message_pb2
from twinkle_services.gateway.http.call import json_bytes
from twinkle_services.gateway.http.validation import (
    JsonModel,
    Tagged,
    fixed,
    not_served,
    read_model,
    read_value,
)
from twinkle_services.gateway.openai.bodies import (
    MAX_TOKENS,
    GenerationBody,
    JsonSchema,
    NotServed,
    PlainFormat,
    SamplingBody,
    SchemaFormat,
    Unpadded,
    Unstored,
    Verbosity,
)
from twinkle_services.gateway.openai.chat_request import (
    ToolArguments,
    add_call,
    check_system_roles,
    choice_of,
    conversation_request,
    parts_of,
    text_message,
)
from twinkle_services.gateway.openai.request import GenerationRequest
from twinkle_services.gateway.openai.tools import FunctionDefinition, ToolFields, ToolList, tool_use
from twinkle_services.kit.errors import InvalidField

_STATELESS = 'is not supported, because responses are not stored; send all items of the conversation as input'
_NotStored = Annotated[None, not_served(_STATELESS)]
_FIELDS = ToolFields(tool_name='tools[{index}].name', chosen_name='tool_choice.name', output_format='text.format')
_REPEATED = ('instructions', 'max_output_tokens', 'temperature', 'top_p')
"""Fields of a body that its response repeats, and that are null by default."""
MAX_REPEATED_BYTES = 1 << 19
"""Maximum size of each of `tools`, `text` and `metadata`, which the event loop serializes up to three times."""


class ItemPart(JsonModel):
    """Text part of an item."""

    is_unknown_null_absent: ClassVar[bool] = True
    type: Literal['input_text', 'output_text', 'text']
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] = Field(default_factory=list[Any])
    logprobs: Annotated[list[Any], Field(max_length=0)] = Field(default_factory=list[Any])


_ItemParts = Annotated[list[ItemPart], Field(fail_fast=True), BeforeValidator(parts_of)]


class Item(JsonModel):
    """Fields of all items; ids and states of earlier responses are accepted without effect."""

    is_unknown_null_absent: ClassVar[bool] = True
    id: str = ''
    status: Literal['in_progress', 'completed', 'incomplete'] = 'completed'


class MessageItem(Item):
    """Message of a conversation."""

    type: Literal['message']
    role: Literal['system', 'developer', 'user', 'assistant']
    content: _ItemParts


class CallItem(Item):
    """Call of a function by the model."""

    type: Literal['function_call']
    call_id: str
    name: str
    arguments: ToolArguments


class ResultItem(Item):
    """Result of a call."""

    type: Literal['function_call_output']
    call_id: str
    output: _ItemParts


def _typed(value: Any) -> Any:
    """Return an item unchanged, except that an object without a type becomes a message."""
    if not isinstance(value, dict) or cast('dict[str, Any]', value).get('type') is not None:
        return cast('Any', value)
    return {**cast('dict[str, Any]', value), 'type': 'message'}


_Item = MessageItem | CallItem | ResultItem
_TAGGED = Tagged('type', note='; other items are not supported')
_ITEM = TypeAdapter[_Item](Annotated[_Item, _TAGGED, BeforeValidator(_typed)])


class ItemToolType(JsonModel):
    """Type of a tool, which is checked before its other fields."""

    type: Literal['function']


class ItemFunction(FunctionDefinition, ItemToolType):
    """Function that the model may call, as a tool of `/v1/responses`."""


class ItemToolChoice(JsonModel):
    """Whether the model may or must call a tool, or the function that it must call."""

    type: Literal['none', 'auto', 'required', 'function']
    name: str = ''


class PlainItemFormat(PlainFormat):
    """Format of a text that satisfies no schema."""

    is_unknown_null_absent: ClassVar[bool] = True
    name: str = ''
    description: str = ''
    strict: bool = True


class SchemaItemFormat(JsonSchema):
    """Format of a text that satisfies a schema."""

    is_unknown_null_absent: ClassVar[bool] = True
    type: Literal['json_schema']
    name: str = 'response'
    description: str = ''


class ItemText(JsonModel):
    """Settings of the text."""

    format: Annotated[PlainItemFormat | SchemaItemFormat, Tagged('type')] = PlainItemFormat(type='text')
    verbosity: Verbosity = 'medium'


class ItemStreamOptions(JsonModel):
    """Options of a stream."""

    include_obfuscation: Unpadded = False


class ItemReasoning(JsonModel):
    """Settings of the reasoning."""

    summary: Literal['auto', 'concise', 'detailed'] = 'auto'
    """Accepted without effect: responses have no items of reasoning to summarize."""
    effort: NotServed = None


class ItemBody(GenerationBody):
    """Body of `/v1/responses`."""

    input: Any
    """A string or a list of items; checked when it is converted."""
    instructions: str = ''
    tools: ToolList[ItemFunction] = Field(default_factory=list[ItemFunction])
    tool_choice: Annotated[ItemToolChoice, BeforeValidator(choice_of)] = ItemToolChoice(type='auto')
    parallel_tool_calls: bool = True
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    text: ItemText = ItemText()
    stream_options: ItemStreamOptions = ItemStreamOptions()

    background: Unstored = False
    truncation: Annotated[str, fixed('disabled', 'must be "disabled"; conversations are not cut')] = 'disabled'
    top_logprobs: Annotated[int, fixed(0, 'must be 0; use chat completions for log-probabilities')] = 0
    include: list[Literal['reasoning.encrypted_content']] = Field(default_factory=list[Any])
    """Accepted without effect: responses have no items of reasoning."""
    previous_response_id: _NotStored = None
    conversation: _NotStored = None
    prompt: _NotStored = None
    reasoning: ItemReasoning = ItemReasoning()
    max_tool_calls: NotServed = None


def item_request(body: Mapping[str, Any]) -> GenerationRequest:
    """Validate and convert a body of `/v1/responses`.

    Raises:
        InvalidField: a field is wrong; the error has its path.
    """
    given = read_model(ItemBody, body)
    form = given.text.format
    sampling = SamplingBody(
        model=given.model,
        temperature=given.temperature,
        top_p=given.top_p,
        stream=given.stream,
        response_format=SchemaFormat(type=form.type, json_schema=form) if isinstance(form, SchemaItemFormat) else form,
    )
    use = tool_use(
        given.tools,
        given.tool_choice.type,
        chosen_name=given.tool_choice.name,
        is_parallel=given.parallel_tool_calls,
        has_format=sampling.has_format,
        fields=_FIELDS,
    )
    messages = _messages(given.input)
    if given.instructions:
        messages.insert(0, text_message('system', [given.instructions]))
    request = conversation_request(sampling, messages, use, max_tokens=given.max_output_tokens)
    return replace(request, repeated=_repeated(given, body))


def _repeated(given: ItemBody, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a body that its response repeats, with the defaults of absent ones.

    Raises:
        InvalidField: a field is too large to be repeated.
    """
    fields: dict[str, Any] = {name: body.get(name) for name in _REPEATED}
    fields['metadata'] = dict(given.metadata)
    fields['parallel_tool_calls'] = given.parallel_tool_calls
    fields['text'] = body.get('text') or {'format': {'type': 'text'}}
    fields['tool_choice'] = body.get('tool_choice') or 'auto'
    fields['tools'] = body.get('tools') or []
    for name in ('tools', 'text', 'metadata'):
        size_bytes = len(json_bytes({name: fields[name]}))
        if size_bytes > MAX_REPEATED_BYTES:
            raise InvalidField(
                name, f'may have at most {MAX_REPEATED_BYTES} bytes, because responses repeat it; got {size_bytes}'
            )
    return fields


def _messages(value: Any) -> list[message_pb2.Message]:
    if isinstance(value, str):
        return [text_message('user', [value])]
    if not isinstance(value, list) or not value:
        raise InvalidField('input', 'must be a string, or a list of at least one item')
    messages: list[message_pb2.Message] = []
    roles: list[str] = []
    # Each item is converted before the next one is read, so that only one model of an item is in memory.
    for index, value_of_item in enumerate(cast('list[Any]', value)):
        item = read_value(_ITEM, value_of_item, f'input[{index}]')
        roles.append(item.role if isinstance(item, MessageItem) else item.type)
        if isinstance(item, MessageItem):
            messages.append(text_message(item.role, _texts(item.content)))
        elif isinstance(item, ResultItem):
            messages.append(text_message('tool', _texts(item.output), call_id=item.call_id))
        else:
            # A call is part of the assistant's message before it.
            if not messages or messages[-1].role != message_pb2.ROLE_ASSISTANT:
                messages.append(message_pb2.Message(role=message_pb2.ROLE_ASSISTANT))
            add_call(messages[-1], item.call_id, item.name, item.arguments)
    check_system_roles(roles, 'input')
    return messages


def _texts(parts: Sequence[ItemPart]) -> Iterator[str]:
    return (part.text for part in parts)
