"""Converts bodies of Anthropic's `/v1/messages`, whose content consists of blocks, to requests for chats."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter

from twinkle.api.data.v1 import message_pb2
from twinkle_services.gateway.http.validation import JsonModel, StopStrings, Tagged, not_served, read_model, read_value
from twinkle_services.gateway.openai.bodies import MAX_TOKENS, NotServed, SamplingBody, shallow
from twinkle_services.gateway.openai.chat_request import (
    add_call,
    conversation_request,
    parts_of,
    text_message,
)
from twinkle_services.gateway.openai.request import GenerationRequest
from twinkle_services.gateway.openai.tools import (
    FunctionDefinition,
    ParametersSchema,
    ToolFields,
    ToolList,
    tool_use,
)

_FIELDS = ToolFields(tool_name='tools[{index}].name', chosen_name='tool_choice.name', output_format='output_config')
_CHOICES = {'auto': 'auto', 'none': 'none', 'any': 'required', 'tool': 'function'}
"""Choices of OpenAI's API by the type of Anthropic's choice with the same meaning."""


class CacheControl(JsonModel):
    """Hint to cache a prefix; accepted without effect, because engines with a cache keep every prefix."""

    type: Literal['ephemeral']
    ttl: str = ''


class Block(JsonModel):
    """Fields of all blocks."""

    is_unknown_null_absent: ClassVar[bool] = True
    cache_control: CacheControl | None = None


class TextBlock(Block):
    """Text of a message."""

    type: Literal['text']
    text: str


_TextBlocks = Annotated[list[TextBlock], Field(fail_fast=True), BeforeValidator(parts_of)]


class ToolUseBlock(Block):
    """Tool call by the assistant."""

    type: Literal['tool_use']
    id: str
    name: str
    input: Annotated[dict[str, Any], AfterValidator(shallow)]


class ToolResultBlock(Block):
    """Result of a call, in a message of the user."""

    type: Literal['tool_result']
    tool_use_id: str
    content: _TextBlocks = Field(default_factory=list[TextBlock])
    is_error: bool = False
    """Accepted without effect: chat templates render only the content."""


_UserBlock = Annotated[TextBlock | ToolResultBlock, Tagged('type', note=' in messages of the user')]
_AssistantBlock = Annotated[TextBlock | ToolUseBlock, Tagged('type', note=' in messages of the assistant')]


class UserBlocks(JsonModel):
    """Message of the user."""

    role: Literal['user']
    content: Annotated[list[_UserBlock], Field(min_length=1, fail_fast=True), BeforeValidator(parts_of)]


class AssistantBlocks(JsonModel):
    """Message of the assistant."""

    role: Literal['assistant']
    content: Annotated[list[_AssistantBlock], Field(min_length=1, fail_fast=True), BeforeValidator(parts_of)]


_MESSAGE = TypeAdapter[UserBlocks | AssistantBlocks](Annotated[UserBlocks | AssistantBlocks, Tagged('role')])


class BlockToolType(JsonModel):
    """Type of a tool, which is checked before its other fields."""

    type: Literal['custom'] = 'custom'


class BlockTool(FunctionDefinition, BlockToolType):
    """Tool that the model may call."""

    is_unknown_null_absent: ClassVar[bool] = True
    parameters: ParametersSchema = Field(alias='input_schema')
    cache_control: CacheControl | None = None


class BlockToolChoice(JsonModel):
    """Whether the model may or must call a tool, or the tool that it must call."""

    type: Literal['auto', 'none', 'any', 'tool']
    name: str = ''
    disable_parallel_tool_use: bool = False


class UserLabel(JsonModel):
    """Label of the caller's user; accepted without effect."""

    user_id: str = ''


class ThinkingOff(JsonModel):
    """Setting that disables the thinking of the model."""

    type: Literal['disabled']


class BlockBody(JsonModel):
    """Body of `/v1/messages`."""

    model: Annotated[str, Field(min_length=1)]
    messages: Annotated[list[Any], Field(min_length=1)]
    """Messages; each is checked when it is converted, so that only one model of a message is in memory."""
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    system: _TextBlocks = Field(default_factory=list[TextBlock])
    tools: ToolList[BlockTool] = Field(default_factory=list[BlockTool])
    tool_choice: BlockToolChoice = BlockToolChoice(type='auto')
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    stop_sequences: StopStrings | None = None
    stream: bool = False
    thinking: ThinkingOff | None = None
    """None leaves the decision to the chat template; a thought is part of the text."""

    # Labels and hints. They do not affect the response.
    metadata: UserLabel = UserLabel()
    cache_control: CacheControl | None = None
    service_tier: Literal['auto', 'standard_only'] = 'auto'

    output_config: NotServed = None
    container: NotServed = None
    mcp_servers: Annotated[None, not_served('is not supported; give the tools of the servers as tools')] = None


def message_request(body: Mapping[str, Any]) -> GenerationRequest:
    """Validate and convert a body of `/v1/messages`.

    Raises:
        InvalidField: a field is wrong; the error has its path.
    """
    given = read_model(BlockBody, body)
    sampling = SamplingBody(
        model=given.model,
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=given.top_k,
        stop=given.stop_sequences,
        stream=given.stream,
    )
    choice = given.tool_choice
    use = tool_use(
        given.tools,
        _CHOICES[choice.type],
        chosen_name=choice.name,
        is_parallel=not choice.disable_parallel_tool_use,
        has_format=False,
        fields=_FIELDS,
    )
    messages = [
        message for index, item in enumerate(given.messages) for message in _messages(item, f'messages[{index}]')
    ]
    if given.system:
        messages.insert(0, text_message('system', _texts(given.system)))
    is_thinking_enabled = False if given.thinking else None
    return conversation_request(
        sampling, messages, use, max_tokens=given.max_tokens, is_thinking_enabled=is_thinking_enabled
    )


def _texts(blocks: Iterable[TextBlock]) -> Iterator[str]:
    return (block.text for block in blocks)


def _messages(given: Any, path: str) -> Iterator[message_pb2.Message]:
    """Convert a message to chat messages: one for each result of a call, and then one with the text and the calls."""
    item = read_value(_MESSAGE, given, path)
    turn = text_message(item.role, _texts(block for block in item.content if isinstance(block, TextBlock)))
    for block in item.content:
        if isinstance(block, ToolResultBlock):
            yield text_message('tool', _texts(block.content), call_id=block.tool_use_id)
        elif isinstance(block, ToolUseBlock):
            add_call(turn, block.id, block.name, block.input)
    if not all(isinstance(block, ToolResultBlock) for block in item.content):
        yield turn
