"""Chat completions: the request body with its messages and tools, and its conversion to the sampler contract.

The bodies of other APIs are converted to the messages of this module, and then by `conversation_request`.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, PlainValidator, ValidationInfo, field_validator, model_validator

from twinkle.api.data.v1 import message_pb2
from twinkle.api.sampler.v1 import sampling_pb2
from twinkle_services.gateway.http.body import parse_object
from twinkle_services.gateway.http.validation import JsonModel, fixed, not_served, read_model
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
    MAX_TOOLS,
    FunctionDefinition,
    ToolUse,
    forced_output,
    prompt_tools,
    tool_use,
)
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.rpc.json_values import struct_of
from twinkle_services.kit.rpc.message_elements import check_elements

_ROLES = {'user': message_pb2.ROLE_USER, 'assistant': message_pb2.ROLE_ASSISTANT, 'tool': message_pb2.ROLE_TOOL}
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
_Parts = Annotated[list[TextPart], Field(min_length=1, fail_fast=True)]


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
    """Convert a text to a list of one part, and return any other value unchanged."""
    return [{'type': 'text', 'text': content}] if isinstance(content, str) else content


class ChatMessage(JsonModel):
    """Message of a chat."""

    is_unknown_null_absent: ClassVar[bool] = True
    role: Literal['system', 'developer', 'user', 'assistant', 'tool']
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] = Field(default_factory=list[ToolCall])
    tool_call_id: str = ''
    name: str = ''
    """Name of the called tool; accepted without effect, because the id determines the call."""
    reasoning_content: str = ''
    content: Annotated[_Parts | None, BeforeValidator(parts_of), Field(validate_default=True)] = None

    @field_validator('tool_calls', 'reasoning_content', 'tool_call_id', 'name')
    @classmethod
    def _check_role(cls, value: Any, info: ValidationInfo) -> Any:
        owner = 'tool' if info.field_name in {'tool_call_id', 'name'} else 'assistant'
        if info.data.get('role', owner) != owner:
            raise ValueError(f'is accepted only in messages with the role {owner}')
        return value

    @field_validator('content')
    @classmethod
    def _check_content(cls, parts: list[TextPart] | None, info: ValidationInfo) -> list[TextPart] | None:
        if parts is None and not info.data.get('tool_calls'):
            raise ValueError('is required')
        return parts


def text_message(role: Any, texts: Iterable[str]) -> ChatMessage:
    """Return a message with the joined texts."""
    return ChatMessage(role=role, content=[TextPart(type='text', text=''.join(texts))])


def result_message(call_id: str, texts: Iterable[str]) -> ChatMessage:
    """Return a message with the result of a call."""
    return text_message('tool', texts).model_copy(update={'tool_call_id': call_id})


def tool_call(call_id: str, name: str, arguments: dict[str, Any]) -> ToolCall:
    """Return a call with valid arguments."""
    # The validator of the arguments expects JSON text.
    return ToolCall(id=call_id, function=FunctionCall.model_construct(name=name, arguments=arguments))


class FunctionTool(JsonModel):
    """Tool that the model may call."""

    type: Literal['function']
    function: FunctionDefinition


class FunctionName(JsonModel):
    """Name of the function that the model must call."""

    name: str


class ToolChoice(JsonModel):
    """Whether the model may or must call a tool, or the function that it must call."""

    is_null_absent: ClassVar[bool] = False
    type: Literal['none', 'auto', 'required', 'function']
    function: FunctionName | None = None

    @model_validator(mode='after')
    def _check_function(self) -> Self:
        if (self.type == 'function') != (self.function is not None):
            raise InvalidField('tool_choice.function', 'is required with "type": "function", and accepted only with it')
        return self


def choice_of(value: Any) -> Any:
    """Convert a text to an object with this type, and return any other value unchanged."""
    return {'type': value} if isinstance(value, str) else value


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

    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(
        default_factory=list[FunctionTool]
    )
    tool_choice: Annotated[ToolChoice, BeforeValidator(choice_of)] = ToolChoice(type='auto')
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
        chosen_name=choice.function.name if choice.function else '',
        is_parallel=given.parallel_tool_calls,
        has_format=given.has_format,
    )
    return conversation_request(
        given,
        given.messages,
        use,
        max_tokens=max_tokens,
        top_logprobs=top_logprobs,
        is_thinking_enabled=given.chat_template_kwargs.enable_thinking,
    )


def conversation_request(
    body: SamplingBody,
    messages: Sequence[ChatMessage],
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


def _trajectory(messages: Sequence[ChatMessage], use: ToolUse | None) -> message_pb2.Trajectory:
    system = list(takewhile(lambda message: message.role in {'system', 'developer'}, messages))
    turns = [_message(message) for message in messages[len(system) :]]
    if system:
        turns.insert(0, _joined(system))
    return message_pb2.Trajectory(messages=turns, tools=prompt_tools(use) if use else ())


def _joined(messages: Iterable[ChatMessage]) -> message_pb2.Message:
    """Return one system message, because chat templates accept only one."""
    text = '\n\n'.join(''.join(part.text for part in message.content or ()) for message in messages)
    return message_pb2.Message(role=message_pb2.ROLE_SYSTEM, parts=[message_pb2.ContentPart(text=text)])


def _message(message: ChatMessage) -> message_pb2.Message:
    native = message_pb2.Message(
        role=_ROLES[message.role],
        parts=[message_pb2.ContentPart(text=part.text) for part in message.content or ()],
        tool_call_id=message.tool_call_id,
        reasoning_content=message.reasoning_content,
    )
    for call in message.tool_calls:
        arguments = struct_of(call.function.arguments)
        native.tool_calls.add(tool_call_id=call.id, name=call.function.name, arguments=arguments)
    return native
