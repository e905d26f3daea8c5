"""Warnings about unavailable services: one for each outage, however many calls wait for the service."""

import logging

import grpc

from twinkle_client.errors import Error

_log = logging.getLogger('twinkle_client')

_UNREACHABLE = 'SERVICE_UNREACHABLE'
_EXPECTED = ('VERSION_NOT_READY', 'ENGINE_PAUSED')
"""Reasons of temporary refusals in normal work."""


class Outages:
    """Logs a warning when a service becomes unavailable.

    An outage begins with the first call that waits for the service, and ends when no call waits for it.

    Args:
        address: Address of the gateway, for messages.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._waiters: dict[str, set[object]] = {}
        """Waiting calls by description of the outage."""

    def add(self, waiter: object, error: Error, *, seconds: float) -> None:
        """Record that a call waits for a service; the first one logs a warning.

        Args:
            waiter: Identifies the call.
            error: Failure of the last attempt. Only services that are unavailable are reported.
            seconds: Time for which the call is retried.
        """
        if error.code is not grpc.StatusCode.UNAVAILABLE or error.reason in _EXPECTED:
            return
        self._begin(waiter, self._problem(error), f'retrying for up to {seconds:.0f} s')

    def add_stream(self, waiter: object, service: str) -> None:
        """Record that a running response waits for a service; the first waiter logs a warning."""
        self._begin(waiter, _unavailable(service), 'the response continues when it is back')

    def remove(self, waiter: object) -> None:
        """Record that a call does not wait any more."""
        for problem, waiters in list(self._waiters.items()):
            waiters.discard(waiter)
            if not waiters:
                del self._waiters[problem]

    def _begin(self, waiter: object, problem: str, reaction: str) -> None:
        waiters = self._waiters.setdefault(problem, set())
        if not waiters:
            _log.warning('%s; %s', problem, reaction)
        waiters.add(waiter)

    def _problem(self, error: Error) -> str:
        if not error.reason:
            return f'the gateway at {self._address} is unavailable'
        if error.reason == _UNREACHABLE:
            return _unavailable(error.metadata.get('service', 'requested'))
        return error.message.removesuffix('; retry later')


def _unavailable(service: str) -> str:
    return f'the {service} service is unavailable'
