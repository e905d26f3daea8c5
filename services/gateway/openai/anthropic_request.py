"""Converts bodies of Anthropic's `/v1/messages`, whose content consists of blocks, to requests for chats."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import AfterValidator, BeforeValidator, Field

from twinkle_services.gateway.http.validation import JsonModel, StopStrings, not_served, read_model
from twinkle_services.gateway.openai.bodies import MAX_TOKENS, NotServed, SamplingBody, shallow
from twinkle_services.gateway.openai.chat_request import (
    ChatMessage,
    conversation_request,
    parts_of,
    result_message,
    text_message,
    tool_call,
)
from twinkle_services.gateway.openai.request import GenerationRequest
from twinkle_services.gateway.openai.tools import (
    MAX_TOOLS,
    FunctionDefinition,
    ParametersSchema,
    ToolFields,
    ToolName,
    tool_use,
)
from twinkle_services.kit.errors import InvalidField

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


_BLOCKS: Mapping[str, type[TextBlock | ToolUseBlock | ToolResultBlock]] = {
    'text': TextBlock,
    'tool_use': ToolUseBlock,
    'tool_result': ToolResultBlock,
}
_OWNERS = {'tool_use': 'assistant', 'tool_result': 'user'}
"""Role of the messages that may contain a block."""


class BlockMessage(JsonModel):
    """Message of a conversation."""

    role: Literal['user', 'assistant']
    content: Any
    """A string or a list of blocks; checked when it is converted."""


class BlockTool(JsonModel):
    """Tool that the model may call."""

    is_unknown_null_absent: ClassVar[bool] = True
    type: Literal['custom'] = 'custom'
    name: ToolName
    description: str = ''
    input_schema: ParametersSchema
    cache_control: CacheControl | None = None
    strict: bool = False
    """Accepted without effect: arguments are constrained if, and only if, the request requires a call."""


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
    tools: Annotated[list[BlockTool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(
        default_factory=list[BlockTool]
    )
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
        [_function(tool) for tool in given.tools],
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


def _function(tool: BlockTool) -> FunctionDefinition:
    return FunctionDefinition(name=tool.name, description=tool.description, parameters=tool.input_schema)


def _texts(blocks: Iterable[TextBlock]) -> Iterator[str]:
    return (block.text for block in blocks)


def _messages(given: Any, path: str) -> list[ChatMessage]:
    """Convert a message to chat messages: one for each result of a call, and then one with the text and the calls."""
    item = read_model(BlockMessage, given, path=path)
    value: Any = parts_of(item.content)
    if not isinstance(value, list) or not value:
        raise InvalidField(f'{path}.content', 'must be a string, or a list of at least one block')
    blocks = [
        _block(block, item.role, f'{path}.content[{index}]') for index, block in enumerate(cast('list[Any]', value))
    ]
    results = [block for block in blocks if isinstance(block, ToolResultBlock)]
    messages = [result_message(block.tool_use_id, _texts(block.content)) for block in results]
    texts = [block for block in blocks if isinstance(block, TextBlock)]
    calls = [tool_call(block.id, block.name, block.input) for block in blocks if isinstance(block, ToolUseBlock)]
    if texts or calls:
        messages.append(text_message(item.role, _texts(texts)).model_copy(update={'tool_calls': calls}))
    return messages


def _block(value: Any, role: str, path: str) -> TextBlock | ToolUseBlock | ToolResultBlock:
    fields = cast('dict[str, Any]', value) if isinstance(value, dict) else {}
    name = str(fields.get('type'))
    kind = _BLOCKS.get(name)
    if kind is None:
        raise InvalidField(f'{path}.type', f'must be {", ".join(_BLOCKS)}; other blocks are not supported')
    if _OWNERS.get(name, role) != role:
        raise InvalidField(f'{path}.type', f'is accepted only in messages with the role {_OWNERS[name]}')
    return read_model(kind, value, path=path)
