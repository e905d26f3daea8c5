"""Errors that only the gateway raises. What it shares with other services is in `services.kit.errors`."""

from dataclasses import dataclass

from services.kit.errors import FailedPrecondition, NotFound


@dataclass(eq=False)
class SessionNotFound(NotFound):
    """No such session for this caller."""

    reason = 'SESSION_NOT_FOUND'
    session_id: str

    def __str__(self) -> str:
        return f'no session {self.session_id!r}'


@dataclass(eq=False)
class SessionFinished(FailedPrecondition):
    """The session's client said that it was done."""

    reason = 'SESSION_FINISHED'
    session_id: str

    def __str__(self) -> str:
        return f'session {self.session_id!r} is finished; create another one'


@dataclass(eq=False)
class RunNotFound(NotFound):
    """No such run for this caller."""

    reason = 'RUN_NOT_FOUND'
    run_id: str

    def __str__(self) -> str:
        return f'no run {self.run_id!r}'


@dataclass(eq=False)
class KeyNotFound(NotFound):
    """No such API key."""

    reason = 'KEY_NOT_FOUND'
    key_id: str

    def __str__(self) -> str:
        return f'no API key {self.key_id!r}'


@dataclass(eq=False)
class TenantNotFound(NotFound):
    """No such tenant."""

    reason = 'TENANT_NOT_FOUND'
    tenant_id: str

    def __str__(self) -> str:
        return f'no tenant {self.tenant_id!r}'
