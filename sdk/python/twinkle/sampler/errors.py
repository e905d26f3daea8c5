"""Errors of the samplers. An error other than `EngineFailed` affects only the call that raised it."""

from dataclasses import KW_ONLY

from twinkle.errors import error_class


class SamplerError(Exception):
    """Base class of the samplers' errors."""


@error_class(
    '{prompt_tokens} prompt tokens and {max_tokens} new ones do not fit a context of {context_tokens}; '
    'shorten the prompt or lower max_tokens'
)
class ContextExceeded(SamplerError, ValueError):
    """Prompt and new tokens do not fit the context."""

    _: KW_ONLY
    prompt_tokens: int
    max_tokens: int
    context_tokens: int


class InvalidPrompt(SamplerError, ValueError):
    """The prompt is empty, has a token outside the vocabulary, or has media that are invalid or not supported."""


@error_class('{field}: {problem}')
class InvalidSamplingParams(SamplerError, ValueError):
    """A parameter is not valid for this model or engine."""

    field: str
    problem: str


class InvalidContinuation(SamplerError, ValueError):
    """The given sequences cannot be the beginning of this request's output."""


@error_class('{what} is not supported by the torch engine; use another engine, such as vLLM')
class NotSupportedByEngine(SamplerError, ValueError):
    """This engine does not support the feature."""

    what: str


@error_class('requests are running, or the base weights are already being replaced; cancel the requests, or wait')
class SamplerBusy(SamplerError, RuntimeError):
    """Requests are running on the weights to replace, or the weights are already being replaced."""


@error_class('request {request_id!r} is running already; choose another id')
class DuplicateRequest(SamplerError, ValueError):
    """A request with that id is running."""

    request_id: str


@error_class('no request {request_id!r} is running')
class UnknownRequest(SamplerError, KeyError):
    """No request with that id is running."""

    request_id: str


@error_class('no adapter {name!r}; add it with add_adapter_to_sampler. Known: {known}')
class UnknownAdapter(SamplerError, KeyError):
    """No adapter with that name was added."""

    name: str
    known: list[str]


class AdapterDoesNotFit(SamplerError, ValueError):
    """An adapter's weights cannot be used with this model; no weights were loaded."""


class BaseDoesNotFit(SamplerError, ValueError):
    """The weights do not belong to this base model; the previous weights stay in use."""


class EngineFailed(SamplerError, RuntimeError):
    """The engine could not complete a call. Unless the message asks for a retry, start another engine."""


class SleepUnavailable(SamplerError, RuntimeError):
    """The engine or the platform cannot release its memory and continue later."""
