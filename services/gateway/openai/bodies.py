"""Request bodies of completions, and the parameters that chat completions share. Unsupported parameters are refused."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from twinkle_services.gateway.http.call import json_bytes
from twinkle_services.gateway.http.validation import (
    Int64,
    JsonModel,
    StopStrings,
    StopTokens,
    Tagged,
    TextLabels,
    fixed,
    is_shallow,
    not_served,
)

MAX_TOKENS = 2**31 - 1
MAX_TOP_LOGPROBS = 20
MAX_DEPTH = 24
"""Maximum depth of client JSON; a JSON level takes three protobuf levels, and protobuf parsers allow one hundred."""
MAX_SCHEMA_BYTES = 1 << 16
"""Maximum number of bytes of a schema, which is copied for each prompt of a request."""

_Choices = Annotated[int, Field(ge=1, le=128)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
TopLogprobCount = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
NotServed = Annotated[None, not_served('is not supported')]
Unstored = Annotated[bool, fixed(False, 'must be false; responses are not stored')]
Unpadded = Annotated[bool, fixed(False, 'must be false; events are not padded')]
Verbosity = Annotated[str, fixed('medium', 'must be "medium"; it does not affect the model')]
_NoBias = Annotated[dict[str, Any], fixed({}, 'must be empty; biases are not supported')]


class StreamOptions(JsonModel):
    """Options of a streamed response."""

    include_usage: bool = False
    include_obfuscation: Unpadded = False


def shallow(value: dict[str, Any]) -> dict[str, Any]:
    """Return an object that is nested at most `MAX_DEPTH` levels deep.

    Raises:
        ValueError: the object is nested more deeply.
    """
    if not is_shallow(value, MAX_DEPTH):
        raise ValueError(f'must be nested at most {MAX_DEPTH} levels deep')
    return value


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    if len(json_bytes(shallow(schema))) > MAX_SCHEMA_BYTES:
        raise ValueError(f'must have at most {MAX_SCHEMA_BYTES} bytes')
    return schema


class JsonSchema(JsonModel):
    """JSON schema that a completion must satisfy."""

    name: str
    description: Any = None
    # `schema` is a method of pydantic's base class.
    content: Annotated[dict[str, Any], AfterValidator(_schema)] = Field(alias='schema')
    strict: bool = True
    """Accepted without effect: a schema is always enforced."""


class PlainFormat(JsonModel):
    """Format of a completion that is a text or any JSON object."""

    type: Literal['text', 'json_object']


class SchemaFormat(JsonModel):
    """Format of a completion that is JSON and satisfies a schema."""

    type: Literal['json_schema']
    json_schema: JsonSchema


ResponseFormat = Annotated[PlainFormat | SchemaFormat, Tagged('type')]


class GenerationBody(JsonModel):
    """Parameters that completions, chat completions and responses share."""

    model: Annotated[str, Field(min_length=1)]
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stream: bool = False

    # Labels and hints. They do not affect the response, as in OpenAI's API.
    user: str = ''
    safety_identifier: str = ''
    prompt_cache_key: str = ''
    metadata: TextLabels = Field(default_factory=dict[str, str])

    store: Unstored = False
    service_tier: Literal['auto', 'default'] = 'auto'


class SamplingBody(GenerationBody):
    """Parameters that completions and chat completions share."""

    n: _Choices | None = None
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
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    logit_bias: _NoBias = Field(default_factory=dict[str, Any])
    prompt_cache_retention: NotServed = None

    @property
    def has_format(self) -> bool:
        """Whether the completion must have a format other than text."""
        return self.response_format is not None and self.response_format.type != 'text'

    @field_validator('stream_options')
    @classmethod
    def _check_stream(cls, options: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if options is not None and not info.data.get('stream'):
            raise ValueError('is accepted only with "stream": true')
        return options


class CompletionBody(SamplingBody):
    """Body of `/v1/completions`."""

    prompt: Any
    """A string, a list of strings, a list of tokens, or a list of lists of tokens; checked when it is converted."""
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    logprobs: TopLogprobCount | None = None
    echo: bool = False
    best_of: _Choices | None = None
    suffix: Annotated[None, not_served('is not supported; models continue prompts only')] = None

    @field_validator('best_of')
    @classmethod
    def _check_best_of(cls, count: int | None, info: ValidationInfo) -> int | None:
        if count != (info.data.get('n') or 1):
            raise ValueError('must be equal to n; every completion is returned')
        return count
