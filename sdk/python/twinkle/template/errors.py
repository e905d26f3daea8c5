"""Why a chat cannot be turned into tokens."""


class TemplateError(ValueError):
    """A chat or a template that does not fit; the sentence says what to do."""


class UnknownTemplate(TemplateError):
    """No template is registered under this name."""


class UnknownToolCallParser(TemplateError):
    """No parser of tool calls is registered under this name."""


class InvalidFeature(TemplateError):
    """A feature that tokens cannot be put behind."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f'{field} {problem}')
        self.field = field
        """The offending argument or field, such as `prompt_feature.labels`."""
        self.problem = problem
        """What is wrong with it and what would be right."""

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.field, self.problem)


class InvalidTrajectory(TemplateError):
    """A chat that says nothing a model could read."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f'{field} {problem}' if field else problem)
        self.field = field
        """Path of the offending field, such as `messages[1].role`; empty for the whole chat."""
        self.problem = problem
        """What is wrong with it and what would be right."""

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.field, self.problem)


class ExampleTooLong(TemplateError):
    """A chat of more tokens than the template allows, under `truncation_strategy='raise'`."""

    def __init__(self, token_count: int, max_length: int) -> None:
        super().__init__(
            f'the example has {token_count} tokens, more than max_length {max_length}; raise max_length, or choose a '
            f"truncation_strategy of 'left', 'right', 'split' or 'delete'"
        )
        self.token_count = token_count
        self.max_length = max_length

    def __reduce__(self) -> tuple[type, tuple[int, int]]:
        return type(self), (self.token_count, self.max_length)
