"""Errors that only the sampler raises. Shared errors are in `twinkle_services.kit.errors`."""

from datetime import timedelta

from twinkle_services.kit.errors import (
    AlreadyExists,
    Disposition,
    FailedPrecondition,
    FieldViolation,
    InvalidArgument,
    NotFound,
    ServiceUnreachable,
    Unavailable,
    domain_error,
)


@domain_error(
    'CONTEXT_EXCEEDED',
    '{prompt_tokens} prompt tokens and {max_tokens} new ones do not fit a context of {context_tokens}; '
    'shorten the prompt or lower max_tokens',
)
class ContextExceeded(InvalidArgument):
    """Prompt and new tokens do not fit the model's context."""

    prompt_tokens: int
    max_tokens: int
    context_tokens: int

    @property
    def violations(self) -> tuple[FieldViolation, ...]:
        """The violation, which names the prompt."""
        return (FieldViolation('prompt', str(self)),)


@domain_error('SERVICE_UNREACHABLE', 'the engine of the {service} failed while it ran the request; retry later')
class EngineFailed(ServiceUnreachable):
    """The engine failed or was closed while it ran this request; the log contains the cause of a failure."""

    service: str = 'sampler'


@domain_error('REQUEST_NOT_FOUND', 'no request {request_id!r} is running')
class RequestNotFound(NotFound):
    """The caller has no running request with that id."""

    request_id: str


@domain_error('ID_TAKEN', 'request_id {id!r} is running already; choose another or leave it empty')
class RequestIdTaken(AlreadyExists):
    """The caller has a request with that id running."""

    id: str
    kind: str = 'request'


@domain_error('VERSION_NOT_READY', disposition=Disposition.RETRYABLE)
class VersionNotReady(Unavailable):
    """The requested version is not on this sampler yet: it did not arrive in time, or there was no capacity for it."""

    adapter_id: str
    """Id of the adapter, or name of the checkpoint."""
    version: int
    """Exact or lowest version that the request accepts; 0 for any version, or if no more adapters can be followed."""

    def __str__(self) -> str:
        requested = f'version {self.version}' if self.version else 'the requested version'
        return f'{requested} of adapter {self.adapter_id!r} has not reached this sampler yet; retry later'


@domain_error('ADAPTER_NOT_READY', 'adapter {adapter_id!r} cannot be sampled here: it needs {needs}')
class AdapterMisfit(FailedPrecondition):
    """The adapter's weights cannot be used on this sampler."""

    adapter_id: str
    needs: str


class EngineInUse(Exception):
    """The base model cannot be replaced because requests run or the engine sleeps. Clients never see this error."""


@domain_error('ENGINE_PAUSED', 'the engine is paused; retry later', disposition=Disposition.RETRYABLE)
class EnginePaused(Unavailable):
    """An operator paused the engine or put it to sleep."""

    @property
    def retry_after(self) -> timedelta | None:
        """Time to wait before a retry: five seconds, because an operator decides when the pause ends."""
        return timedelta(seconds=5)
