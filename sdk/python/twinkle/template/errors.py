"""Errors of converting chats to tokens. Messages explain how to fix the problem."""

from twinkle.errors import error_class


class TemplateError(ValueError):
    """A chat does not match the template, or a template is invalid."""


class UnknownTemplate(TemplateError):
    """No template is registered under this name."""


class UnknownToolCallParser(TemplateError):
    """No parser of tool calls is registered under this name."""


@error_class('{field} {problem}')
class InvalidFeature(TemplateError):
    """Tokens cannot be appended to the feature."""

    field: str
    """Invalid argument or field, such as `prompt_feature.labels`."""
    problem: str
    """Description of the problem and its fix."""


@error_class()
class InvalidTrajectory(TemplateError):
    """A field of the chat is missing, malformed or not supported by the model."""

    field: str
    """Path of the invalid field, such as `messages[1].role`; empty if the error concerns the whole chat."""
    problem: str
    """Description of the problem and its fix."""

    def __str__(self) -> str:
        return f'{self.field} {self.problem}'.lstrip()


@error_class(
    'the example has {token_count} tokens, more than max_length {max_length}; raise max_length, or choose a '
    "truncation_strategy of 'left', 'right', 'split' or 'delete'"
)
class ExampleTooLong(TemplateError):
    """The chat has more tokens than the template allows and must not be cut; see `Template.encode`."""

    token_count: int
    """Number of tokens in the chat, or a lower bound if the chat was not tokenized."""
    max_length: int
    """The template's limit in tokens."""
