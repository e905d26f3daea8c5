"""Request bodies of completions and chat completions. Unsupported parameters are refused, not ignored."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, PlainValidator, ValidationInfo, field_validator, model_validator

from services.gateway.http.body import parse_object
from services.gateway.http.call import json_bytes
from services.gateway.http.validation import (
    Int64,
    JsonModel,
    StopStrings,
    StopTokens,
    TextLabels,
    fixed,
    is_shallow,
    not_served,
)
from services.kit.errors import InvalidField

MAX_TOKENS = 2**31 - 1
MAX_TOP_LOGPROBS = 20
_MAX_DEPTH = 24
"""Maximum depth of client JSON; a JSON level takes three protobuf levels, and protobuf parsers allow one hundred."""
MAX_SCHEMA_BYTES = 1 << 16
"""Maximum number of bytes of a schema, which is copied for each prompt of a request."""

_Choices = Annotated[int, Field(ge=1, le=128)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
_NotServed = Annotated[None, not_served('is not supported')]
_NoTools = Annotated[None, not_served('is not supported; tool calls are returned as text')]


class StreamOptions(JsonModel):
    """Options of a streamed response."""

    include_usage: bool = False


class JsonSchema(JsonModel):
    """JSON schema that a completion must satisfy."""

    name: str
    description: Any = None
    # `schema` is a method of pydantic's base class.
    content: dict[str, Any] = Field(alias='schema')
    strict: Annotated[bool, fixed(True, 'must be true or absent; a schema is always enforced')] = True

    @field_validator('content')
    @classmethod
    def _check_size(cls, schema: dict[str, Any]) -> dict[str, Any]:
        if not is_shallow(schema, _MAX_DEPTH):
            raise ValueError(f'must be nested at most {_MAX_DEPTH} levels deep')
        if len(json_bytes(schema)) > MAX_SCHEMA_BYTES:
            raise ValueError(f'must have at most {MAX_SCHEMA_BYTES} bytes')
        return schema


class ResponseFormat(JsonModel):
    """Required format of a completion: text, a JSON object, or JSON that satisfies a schema."""

    is_null_absent: ClassVar[bool] = False
    type: Literal['text', 'json_object', 'json_schema']
    json_schema: JsonSchema | None = None

    @model_validator(mode='after')
    def _check_schema(self) -> Self:
        if self.type == 'json_schema' and self.json_schema is None:
            raise InvalidField('response_format.json_schema', 'is required')
        if self.type != 'json_schema' and 'json_schema' in self.model_fields_set:
            raise InvalidField('response_format.json_schema', 'is accepted only with "type": "json_schema"')
        return self


class SamplingBody(JsonModel):
    """Parameters that completions and chat completions share."""

    model: Annotated[str, Field(min_length=1)]
    n: _Choices | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    seed: Int64 | None = None
    stop: StopStrings | None = None
    stop_token_ids: StopTokens | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False

    # Labels. They do not affect the response, as in OpenAI's API.
    user: str = ''
    safety_identifier: str = ''
    metadata: TextLabels = Field(default_factory=dict[str, str])

    store: Annotated[bool, fixed(False, 'must be false; responses are not stored')] = False
    service_tier: Annotated[str, fixed('auto', 'must be "auto"; there is a single tier')] = 'auto'
    logit_bias: _NotServed = None
    prompt_cache_key: Annotated[None, not_served('is not supported; prefixes are cached by their tokens')] = None
    prompt_cache_retention: _NotServed = None

    @field_validator('stream_options')
    @classmethod
    def _check_stream(cls, options: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if options is not None and not info.data.get('stream'):
            raise ValueError('is accepted only with "stream": true')
        return options


class CompletionBody(SamplingBody):
    """Body of `/v1/completions`."""

    prompt: Any
    """A string, a list of strings, a list of tokens, or a list of such token lists; checked when it is converted."""
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    logprobs: _TopLogprobs | None = None
    echo: bool = False
    best_of: _Choices | None = None
    suffix: Annotated[None, not_served('is not supported; models continue prompts only')] = None

    @field_validator('best_of')
    @classmethod
    def _check_best_of(cls, count: int | None, info: ValidationInfo) -> int | None:
        if count != (info.data.get('n') or 1):
            raise ValueError('must be equal to n; every completion is returned')
        return count


class TextPart(JsonModel):
    """Text part of a message."""

    type: Literal['text']
    text: str


def _arguments(value: Any) -> dict[str, Any]:
    if not isinstance(value, str):
        raise ValueError('must be a string')
    try:
        arguments = parse_object(value.encode())
    except InvalidField as error:
        raise ValueError('must be a string that holds a JSON object') from error
    if not is_shallow(arguments, _MAX_DEPTH):
        raise ValueError(f'must be nested at most {_MAX_DEPTH} levels deep')
    return arguments


_Parts = Annotated[list[TextPart], Field(min_length=1, fail_fast=True)]


class FunctionCall(JsonModel):
    """Function and arguments of a tool call."""

    is_null_absent: ClassVar[bool] = False
    name: str
    arguments: Annotated[dict[str, Any], PlainValidator(_arguments)] = Field(default_factory=dict[str, Any])


class ToolCall(JsonModel):
    """Tool call in an assistant's message."""

    is_null_absent: ClassVar[bool] = False
    id: str = ''
    type: Literal['function'] = 'function'
    function: FunctionCall


def _parts(value: Any) -> Any:
    return [{'type': 'text', 'text': value}] if isinstance(value, str) else value


class ChatMessage(JsonModel):
    """Message of a chat."""

    is_unknown_null_absent: ClassVar[bool] = True
    role: Literal['system', 'developer', 'user', 'assistant', 'tool']
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] = Field(default_factory=list[ToolCall])
    tool_call_id: str = ''
    reasoning_content: str = ''
    content: Annotated[_Parts | None, BeforeValidator(_parts), Field(validate_default=True)] = None

    @field_validator('tool_calls', 'reasoning_content', 'tool_call_id')
    @classmethod
    def _check_role(cls, value: Any, info: ValidationInfo) -> Any:
        owner = 'tool' if info.field_name == 'tool_call_id' else 'assistant'
        if info.data.get('role', owner) != owner:
            raise ValueError(f'is accepted only in messages with the role {owner}')
        return value

    @field_validator('content')
    @classmethod
    def _check_content(cls, parts: list[TextPart] | None, info: ValidationInfo) -> list[TextPart] | None:
        if parts is None and not info.data.get('tool_calls'):
            raise ValueError('is required')
        return parts


class ChatTemplateOptions(JsonModel):
    """Options of the chat template."""

    enable_thinking: bool | None = None


class ChatBody(SamplingBody):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    logprobs: bool = False
    top_logprobs: _TopLogprobs | None = None
    chat_template_kwargs: ChatTemplateOptions = ChatTemplateOptions()

    tools: _NoTools = None
    tool_choice: _NoTools = None
    parallel_tool_calls: _NoTools = None
    functions: _NoTools = None
    function_call: _NoTools = None
    audio: _NotServed = None
    modalities: _NotServed = None
    prediction: _NotServed = None
    web_search_options: _NotServed = None
    reasoning_effort: Annotated[None, not_served('is not supported; see chat_template_kwargs.enable_thinking')] = None
    verbosity: _NotServed = None

    @field_validator('messages')
    @classmethod
    def _check_system(cls, messages: list[ChatMessage]) -> list[ChatMessage]:
        for index, message in enumerate(messages):
            if index and message.role in {'system', 'developer'}:
                raise InvalidField(f'messages[{index}].role', 'may be system or developer in the first message only')
        return messages

    @field_validator('top_logprobs')
    @classmethod
    def _check_logprobs(cls, count: int | None, info: ValidationInfo) -> int | None:
        if not info.data.get('logprobs'):
            raise ValueError('is accepted only with "logprobs": true')
        return count
