"""Chat completions: the request body with its messages and tools, and its conversion to the sampler contract.

The bodies of other APIs are converted to the messages of this module, and then by `conversation_request`.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import BeforeValidator, Field, PlainValidator, ValidationInfo, field_validator

from twinkle.api.data.v1 import message_pb2
from twinkle.api.sampler.v1 import sampling_pb2
from twinkle_services.gateway.http.body import parse_object
from twinkle_services.gateway.http.validation import JsonModel, Tagged, fixed, not_served, read_model
from twinkle_services.gateway.openai.bodies import (
    MAX_TOKENS,
    NotServed,
    SamplingBody,
    TopLogprobCount,
    Verbosity,
    shallow,
)
from twinkle_services.gateway.openai.request import GenerationRequest, generation_request, sampling_params
from twinkle_services.gateway.openai.tools import (
    FunctionDefinition,
    ToolList,
    ToolUse,
    forced_output,
    prompt_tools,
    tool_use,
)
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.rpc.json_values import struct_of
from twinkle_services.kit.rpc.message_elements import check_elements

_ROLES = {
    'system': message_pb2.ROLE_SYSTEM,
    'developer': message_pb2.ROLE_SYSTEM,
    'user': message_pb2.ROLE_USER,
    'assistant': message_pb2.ROLE_ASSISTANT,
    'tool': message_pb2.ROLE_TOOL,
}
_Legacy = Annotated[None, not_served('is not supported; use tools and tool_choice')]


class TextPart(JsonModel):
    """Text part of a message."""

    type: Literal['text']
    text: str


def _arguments(value: Any) -> dict[str, Any]:
    if not isinstance(value, str):
        raise ValueError('must be a string')
    try:
        arguments = parse_object(value.encode() or b'{}')
    except InvalidField as error:
        raise ValueError('must be a string that holds a JSON object') from error
    return shallow(arguments)


ToolArguments = Annotated[dict[str, Any], PlainValidator(_arguments)]
"""Arguments of a call, given as a string that holds a JSON object."""


class FunctionCall(JsonModel):
    """Function and arguments of a tool call."""

    is_null_absent: ClassVar[bool] = False
    name: str
    arguments: ToolArguments = Field(default_factory=dict[str, Any])


class ToolCall(JsonModel):
    """Tool call in an assistant's message."""

    is_null_absent: ClassVar[bool] = False
    id: str = ''
    type: Literal['function'] = 'function'
    function: FunctionCall
    index: int = 0
    """Position in a stream, which some clients keep; accepted without effect."""


def parts_of(content: Any) -> Any:
    """Convert a text to a list of one part, and return a list unchanged."""
    if isinstance(content, str):
        return [{'type': 'text', 'text': content}]
    if not isinstance(content, list):
        raise ValueError('must be a string or a list')
    return cast('list[Any]', content)


_Content = Annotated[list[TextPart], Field(min_length=1, fail_fast=True), BeforeValidator(parts_of)]


class InputMessage(JsonModel):
    """Message of the system or the user."""

    is_unknown_null_absent: ClassVar[bool] = True
    role: Literal['system', 'developer', 'user']
    content: _Content


class AssistantMessage(JsonModel):
    """Message of the model: text, calls of tools, or both."""

    is_unknown_null_absent: ClassVar[bool] = True
    role: Literal['assistant']
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] = Field(default_factory=list[ToolCall])
    reasoning_content: str = ''
    content: _Content | None = Field(default=None, validate_default=True)

    @field_validator('content')
    @classmethod
    def _check_content(cls, parts: list[TextPart] | None, info: ValidationInfo) -> list[TextPart] | None:
        if parts is None and not info.data.get('tool_calls'):
            raise ValueError('is required')
        return parts


class ToolMessage(JsonModel):
    """Result of a call."""

    is_unknown_null_absent: ClassVar[bool] = True
    role: Literal['tool']
    tool_call_id: str = ''
    name: str = ''
    """Name of the called tool; accepted without effect, because the id determines the call."""
    content: _Content


ChatMessage = Annotated[InputMessage | AssistantMessage | ToolMessage, Tagged('role')]


class FunctionTool(JsonModel):
    """Tool that the model may call."""

    type: Literal['function']
    function: FunctionDefinition


class FunctionName(JsonModel):
    """Name of the function that the model must call."""

    name: str


class ToolMode(JsonModel):
    """Whether the model may or must call a tool."""

    is_unknown_null_absent: ClassVar[bool] = True
    type: Literal['none', 'auto', 'required']


class NamedTool(JsonModel):
    """Function that the model must call."""

    type: Literal['function']
    function: FunctionName


def choice_of(value: Any) -> Any:
    """Convert a text to an object with this type, and return any other value unchanged."""
    return {'type': value} if isinstance(value, str) else value


ToolChoice = Annotated[ToolMode | NamedTool, Tagged('type'), BeforeValidator(choice_of)]


def check_system_roles(roles: Sequence[str], path: str) -> None:
    """Check that all system and developer messages are at the beginning of the messages in the field `path`.

    Raises:
        InvalidField: a system or developer message follows a message with another role.
    """
    is_system = [role in {'system', 'developer'} for role in roles]
    leading = is_system.index(False) if False in is_system else len(roles)
    if True in is_system[leading:]:
        problem = 'may be system or developer only before all other messages; send the text as the user'
        raise InvalidField(f'{path}[{is_system.index(True, leading)}].role', problem)


class ChatTemplateOptions(JsonModel):
    """Options of the chat template."""

    enable_thinking: bool | None = None


class ChatBody(SamplingBody):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    logprobs: bool = False
    top_logprobs: TopLogprobCount | None = None
    chat_template_kwargs: ChatTemplateOptions = ChatTemplateOptions()

    tools: ToolList[FunctionTool] = Field(default_factory=list[FunctionTool])
    tool_choice: ToolChoice = ToolMode(type='auto')
    parallel_tool_calls: bool = True

    functions: _Legacy = None
    function_call: _Legacy = None
    audio: NotServed = None
    modalities: Annotated[list[str], fixed(['text'], 'must be ["text"]')] = Field(default_factory=lambda: ['text'])
    prediction: NotServed = None
    web_search_options: NotServed = None
    reasoning_effort: Annotated[None, not_served('is not supported; see chat_template_kwargs.enable_thinking')] = None
    verbosity: Verbosity = 'medium'

    @field_validator('messages')
    @classmethod
    def _check_system(cls, messages: list[ChatMessage]) -> list[ChatMessage]:
        check_system_roles([message.role for message in messages], 'messages')
        return messages

    @field_validator('top_logprobs')
    @classmethod
    def _check_logprobs(cls, count: int | None, info: ValidationInfo) -> int | None:
        if count and not info.data.get('logprobs'):
            raise ValueError('is accepted only with "logprobs": true')
        return count


def chat_request(body: Mapping[str, Any]) -> GenerationRequest:
    """Validate and convert a body of `/v1/chat/completions`.

    Raises:
        InvalidField: a field is wrong; the error has its path.
    """
    given = read_model(ChatBody, body)
    max_tokens = given.max_completion_tokens or given.max_tokens
    if given.max_tokens not in (None, max_tokens):
        raise InvalidField('max_tokens', 'differs from max_completion_tokens; give one of them')
    top_logprobs = (given.top_logprobs or 0) if given.logprobs else None
    choice = given.tool_choice
    use = tool_use(
        [tool.function for tool in given.tools],
        choice.type,
        chosen_name=choice.function.name if isinstance(choice, NamedTool) else '',
        is_parallel=given.parallel_tool_calls,
        has_format=given.has_format,
    )
    return conversation_request(
        given,
        map(_message, given.messages),
        use,
        max_tokens=max_tokens,
        top_logprobs=top_logprobs,
        is_thinking_enabled=given.chat_template_kwargs.enable_thinking,
    )


def conversation_request(
    body: SamplingBody,
    messages: Iterable[message_pb2.Message],
    use: ToolUse | None,
    *,
    max_tokens: int | None,
    top_logprobs: int | None = None,
    is_thinking_enabled: bool | None = None,
) -> GenerationRequest:
    """Return the request to continue a chat.

    Raises:
        InvalidField: a parameter is out of range, schemas are too large, or there are too many values.
    """
    params = sampling_params(body, max_tokens=max_tokens, top_logprobs=top_logprobs)
    chat = sampling_pb2.ChatPrompt(trajectory=_trajectory(messages, use))
    # Samplers also refuse a chat with too many elements, but only after this process has parsed it on the event loop.
    check_elements(chat.SerializeToString(), chat.DESCRIPTOR, 'body')
    if use is not None and use.is_forced:
        params.structured_output.CopyFrom(forced_output(use))
        # The constraint begins with the first token, and allows no thought before the calls.
        is_thinking_enabled = is_thinking_enabled or False
    if is_thinking_enabled is not None:
        chat.is_thinking_enabled = is_thinking_enabled
    return generation_request(body, (sampling_pb2.Prompt(chat=chat),), params, top_logprobs=top_logprobs, tools=use)


def _trajectory(messages: Iterable[message_pb2.Message], use: ToolUse | None) -> message_pb2.Trajectory:
    turns = list(messages)
    system = list(takewhile(lambda message: message.role == message_pb2.ROLE_SYSTEM, turns))
    if system:
        # Chat templates accept only one system message.
        texts = (''.join(part.text for part in message.parts) for message in system)
        turns[: len(system)] = [text_message('system', ['\n\n'.join(texts)])]
    return message_pb2.Trajectory(messages=turns, tools=prompt_tools(use) if use else ())


def text_message(role: str, texts: Iterable[str], *, call_id: str = '') -> message_pb2.Message:
    """Return a message with the joined texts; `call_id` is the id of the call that the message answers."""
    parts = [message_pb2.ContentPart(text=''.join(texts))]
    return message_pb2.Message(role=_ROLES[role], parts=parts, tool_call_id=call_id)


def add_call(message: message_pb2.Message, call_id: str, name: str, arguments: Mapping[str, Any]) -> None:
    """Add a call to an assistant's message."""
    message.tool_calls.add(tool_call_id=call_id, name=name, arguments=struct_of(arguments))


def _message(given: InputMessage | AssistantMessage | ToolMessage) -> message_pb2.Message:
    parts = [message_pb2.ContentPart(text=part.text) for part in given.content or ()]
    message = message_pb2.Message(role=_ROLES[given.role], parts=parts)
    if isinstance(given, ToolMessage):
        message.tool_call_id = given.tool_call_id
    elif isinstance(given, AssistantMessage):
        message.reasoning_content = given.reasoning_content
        for call in given.tool_calls:
            add_call(message, call.id, call.function.name, call.function.arguments)
    return message
