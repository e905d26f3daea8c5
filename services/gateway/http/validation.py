"""Validation of JSON bodies with pydantic: base models, shared field types, and errors that name the field."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NoReturn, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from twinkle_services.kit.errors import InvalidField

MAX_TOKEN_ID = 2**31 - 1
_MAX_STOPS = 64
_NAME_CHARACTERS = 100
"""Maximum number of characters of a client's field name that an error repeats."""
_NESTED = (dict, list)

Model = TypeVar('Model', bound=BaseModel)
Value = TypeVar('Value')


class JsonModel(BaseModel):
    """JSON object, validated without coercion; unknown fields are refused, and null counts as absent."""

    model_config = ConfigDict(strict=True, extra='forbid', frozen=True)
    is_null_absent: ClassVar[bool] = True
    """Whether a known field that is null counts as absent."""
    is_unknown_null_absent: ClassVar[bool] = False
    """Whether an unknown field that is null is ignored."""

    @model_validator(mode='before')
    @classmethod
    def _select(cls, values: Any) -> Any:
        """Drop nulls, and all unknown fields except the first, so that a hostile body causes few errors."""
        if not isinstance(values, dict):
            return values
        given = cast('dict[str, Any]', values)
        known = {field.alias or name: None for name, field in cls.model_fields.items()}
        selected = {
            name: given[name] for name in known if name in given and not (cls.is_null_absent and given[name] is None)
        }
        if cls.model_config.get('extra') == 'forbid':
            for name, value in given.items():
                if name not in known and not (cls.is_unknown_null_absent and value is None):
                    return {**selected, name: value}
        return selected


@dataclass(frozen=True)
class Tagged:
    """Annotation of a union of `JsonModel` classes: the literal field `name`, the tag, selects the class.

    In contrast to pydantic's discriminated unions, errors have the paths of the JSON document, without the tag.
    """

    name: str
    note: str = ''
    """End of the message that lists the tags, such as ' in messages of the user'."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return handler.generate_schema(Annotated[source, Discriminator(self.name), WrapValidator(self._validate)])

    def _validate(self, value: Any, parse: ValidatorFunctionWrapHandler) -> Any:
        try:
            return parse(value)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            location, problem = first['loc'][1:], _problem(first)
            if first['type'] in {'union_tag_invalid', 'union_tag_not_found'}:
                location, problem = (self.name,), problem + self.note
            elif first['type'] == 'extra_forbidden' and len(location) == 1:
                problem += f' with {self.name} {first["loc"][0]!r}'
            detail = {'type': 'value_error', 'loc': location, 'input': value, 'ctx': {'error': ValueError(problem)}}
            raise ValidationError.from_exception_data(error.title, [cast('Any', detail)]) from error


def read_model(model: type[Model], body: Any, *, path: str = '') -> Model:
    """Validate a JSON object at `path` in the request body; an empty path is the body itself.

    Raises:
        InvalidField: a field is wrong; the error names the first one.
    """
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _refusal(error, path) from error


def read_value(adapter: TypeAdapter[Value], value: Any, path: str) -> Value:
    """Validate a JSON value at `path` in the request body.

    Raises:
        InvalidField: the value is wrong; the error names the value or the first wrong element.
    """
    try:
        return adapter.validate_python(value, strict=True)
    except ValidationError as error:
        raise _refusal(error, path) from error


def field_path(location: Sequence[str | int], path: str = '') -> str:
    """Return a pydantic location below `path` as a field path, such as `messages[0].role`; 'body' if both are empty."""
    for part in location:
        if isinstance(part, int):
            path += f'[{part}]'
        else:
            path += f'.{part[:_NAME_CHARACTERS]}' if path else part[:_NAME_CHARACTERS]
    return path or 'body'


def _refusal(error: ValidationError, path: str) -> InvalidField:
    first = error.errors(include_url=False, include_input=False)[0]
    return InvalidField(field_path(first['loc'], path), _problem(first))


def _problem(found: Mapping[str, Any]) -> str:
    match found['type']:
        case 'missing' | 'union_tag_not_found':
            return 'is required'
        case 'union_tag_invalid':
            return f'must be one of {found["ctx"]["expected_tags"]}'
        case 'extra_forbidden':
            return 'is not a known parameter'
        case 'value_error':
            return str(found.get('ctx', {}).get('error', found['msg']))
        case 'model_type' | 'model_attributes_type' | 'dict_type':
            return 'must be an object'
        case _:
            return re.sub(r'^\w+ should', 'must', found['msg'])


def not_served(problem: str) -> BeforeValidator:
    """Return a validator that refuses every value of a parameter, with `problem` as the message."""

    def refuse(value: Any) -> NoReturn:
        raise ValueError(problem)

    return BeforeValidator(refuse)


def fixed(allowed: object, problem: str) -> AfterValidator:
    """Return a validator that accepts only the value `allowed`, and otherwise refuses with `problem`."""

    def check(value: Value) -> Value:
        if value != allowed:
            raise ValueError(problem)
        return value

    return AfterValidator(check)


def is_shallow(value: Any, depth: int) -> bool:
    """Return whether the objects and lists of a parsed JSON value are nested at most `depth` levels deep."""
    level: list[Any] = [value]
    for _ in range(depth):
        # Bodies may have millions of numbers, so this check must be fast.
        level = [child for parent in level for child in _children(parent) if type(child) in _NESTED]
    return not level


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(cast('dict[str, Any]', value).values())
    return cast('list[Any]', value) if isinstance(value, list) else []


def _text_values(value: Any, info: ValidationInfo) -> Mapping[str, str]:
    # pydantic would collect an error for each wrong value, and a hostile body may have very many.
    if not isinstance(value, dict):
        raise ValueError('must be an object')
    for name, label in cast('dict[str, Any]', value).items():
        if not isinstance(label, str):
            raise InvalidField(field_path((info.field_name or '', name)), 'must be a string')
    return cast('dict[str, str]', value)


def _as_list(kind: type) -> Callable[[Any], Any]:
    return lambda value: [value] if isinstance(value, kind) else value


TextLabels = Annotated[Mapping[str, str], PlainValidator(_text_values)]
"""Labels that the client chooses. Use it only for fields at the top level of a body."""
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
StopStrings = Annotated[list[Stop], Field(max_length=_MAX_STOPS, fail_fast=True), BeforeValidator(_as_list(str))]
"""Stop strings: one string, or a list."""
StopTokens = Annotated[list[TokenId], Field(max_length=_MAX_STOPS, fail_fast=True)]
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
