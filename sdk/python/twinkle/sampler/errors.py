"""What a sampler refuses, as facts a caller can act on.

All are raised before any state changes. A service maps them to its own errors.
"""


class SamplerError(Exception):
    """Base of everything the sampler raises by itself."""


class ContextExceeded(SamplerError, ValueError):
    """Prompt and new tokens do not fit the context."""

    def __init__(self, *, prompt_tokens: int, max_tokens: int, context_tokens: int) -> None:
        super().__init__(
            f'{prompt_tokens} prompt tokens and {max_tokens} new ones do not fit a context of {context_tokens}; '
            'shorten the prompt or lower max_tokens'
        )
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.context_tokens = context_tokens


class InvalidPrompt(SamplerError, ValueError):
    """The prompt is empty or has a token outside the vocabulary."""


class InvalidSamplingParams(SamplerError, ValueError):
    """The parameters are legal alone, but not for this model or engine."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f'{field}: {message}')
        self.field = field


class InvalidContinuation(SamplerError, ValueError):
    """The sequences so far cannot be the beginning of this request."""


class NotSupportedByEngine(SamplerError, ValueError):
    """This engine cannot do it, whatever the value."""

    def __init__(self, what: str) -> None:
        super().__init__(f'{what} is not supported by the torch engine; use one that is, such as vLLM')
        self.what = what


class SamplerBusy(SamplerError, RuntimeError):
    """Requests run on the weights that are to be replaced."""

    def __init__(self) -> None:
        super().__init__('requests are running; end them, or wait, before the base weights are replaced')


class DuplicateRequest(SamplerError, ValueError):
    """A request of that id is running."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f'request {request_id!r} is running already; choose another id')
        self.request_id = request_id


class UnknownRequest(SamplerError, KeyError):
    """No request of that id is running."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f'no request {request_id!r} is running')
        self.request_id = request_id


class UnknownAdapter(SamplerError, KeyError):
    """No adapter of that name was added."""

    def __init__(self, name: str, known: list[str]) -> None:
        super().__init__(f'no adapter {name!r}; add it with add_adapter_to_sampler. Known: {known}')
        self.name = name
        self.known = known


class AdapterDoesNotFit(SamplerError, ValueError):
    """An adapter's weights cannot be used on this model; nothing of them stays."""


class BaseDoesNotFit(SamplerError, ValueError):
    """Weights are not those of this base model; the old ones go on serving."""


class EngineFailed(SamplerError, RuntimeError):
    """The engine is broken for good, and every request with it; start another."""


class SleepUnavailable(SamplerError, RuntimeError):
    """Engine or platform cannot give its memory back and live."""
