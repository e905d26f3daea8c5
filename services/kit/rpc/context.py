"""The caller and request id of the current call, as context variables."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import CredentialsMissing

_caller: ContextVar[Caller | None] = ContextVar('twinkle_caller', default=None)
_request_id: ContextVar[str] = ContextVar('twinkle_request_id', default='')


def current_caller() -> Caller:
    """Return the caller of the call being served, or the caller set by `acting_for`.

    Raises:
        CredentialsMissing: There is no caller.
    """
    caller = _caller.get()
    if caller is None:
        raise CredentialsMissing()
    return caller


def current_caller_or_none() -> Caller | None:
    """Return the caller of the call being served, or the caller set by `acting_for`; None if there is no caller."""
    return _caller.get()


def current_request_id() -> str:
    """Return the request id of the call being served; empty outside a call."""
    return _request_id.get()


def set_caller(caller: Caller | None) -> None:
    """Set the caller for the rest of this task; used by the interceptors."""
    _caller.set(caller)


def set_request_id(request_id: str) -> None:
    """Set the request id for the rest of this task; used by the interceptors."""
    _request_id.set(request_id)


@contextmanager
def acting_for(caller: Caller) -> Iterator[None]:
    """Set the caller on whose behalf this block calls other services; used outside a served call."""
    token = _caller.set(caller)
    try:
        yield
    finally:
        _caller.reset(token)
