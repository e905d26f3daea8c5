"""What this service refuses, beside the errors every service has."""

from dataclasses import dataclass
from datetime import timedelta

from services.kit.errors import (
    AlreadyExists,
    FailedPrecondition,
    FieldViolation,
    InvalidArgument,
    NotFound,
    Unavailable,
)


@dataclass(eq=False)
class ContextExceeded(InvalidArgument):
    """Prompt and new tokens do not fit the model's context."""

    reason = 'CONTEXT_EXCEEDED'
    prompt_tokens: int
    max_tokens: int
    context_tokens: int

    def __str__(self) -> str:
        return (
            f'{self.prompt_tokens} prompt tokens and {self.max_tokens} new ones do not fit a context of '
            f'{self.context_tokens}; shorten the prompt or lower max_tokens'
        )

    @property
    def violations(self) -> tuple[FieldViolation, ...]:
        """The prompt."""
        return (FieldViolation('prompt', str(self)),)


@dataclass(eq=False)
class RequestNotFound(NotFound):
    """The caller has no such request running."""

    reason = 'REQUEST_NOT_FOUND'
    request_id: str

    def __str__(self) -> str:
        return f'no request {self.request_id!r} is running'


@dataclass(eq=False)
class RequestIdTaken(AlreadyExists):
    """The caller has a request of that id running."""

    reason = 'ID_TAKEN'
    id: str
    kind: str = 'request'

    def __str__(self) -> str:
        return f'request_id {self.id!r} is running already; choose another or leave it empty'


@dataclass(eq=False)
class VersionNotReady(Unavailable):
    """The version asked for has not reached this sampler; it may later."""

    reason = 'VERSION_NOT_READY'
    adapter_id: str
    version: int

    def __str__(self) -> str:
        wanted = f'version {self.version} of adapter' if self.version else 'any version of adapter'
        return f'{wanted} {self.adapter_id!r} has not reached this sampler yet; try again'


@dataclass(eq=False)
class AdapterMisfit(FailedPrecondition):
    """The adapter's weights cannot be used on this base model."""

    reason = 'ADAPTER_NOT_READY'
    adapter_id: str
    needs: str

    def __str__(self) -> str:
        return f'adapter {self.adapter_id!r} cannot be sampled here: it needs {self.needs}'


class EngineInUse(Exception):
    """The base model cannot be replaced now: requests run, or the engine sleeps. Never leaves this service."""


@dataclass(eq=False)
class EnginePaused(Unavailable):
    """An operator has paused the engine."""

    reason = 'ENGINE_PAUSED'

    def __str__(self) -> str:
        return 'the engine is paused; try again later'

    @property
    def retry_after(self) -> timedelta | None:
        """Five seconds: pauses are made by people."""
        return timedelta(seconds=5)
