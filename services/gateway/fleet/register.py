"""The verb by which a replica joins the fleet."""

import ipaddress
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from services.gateway.fleet.membership import Membership
from services.gateway.fleet.rules import Replica, ReplicaReport
from services.kit.authority import require_internal
from services.kit.caller import Caller

_log = structlog.get_logger('fleet')


@dataclass(frozen=True)
class Welcome:
    """What a new member is told."""

    replica: Replica
    checkpoint_address: str
    """Where it finds the checkpoint service; empty: nowhere, as far as this gateway knows."""


class Register:
    """Takes a replica in. Idempotency: the same replica may register again."""

    def __init__(
        self, membership: Membership, *, checkpoint_address: str, is_this_host: Callable[[str], Awaitable[bool]]
    ) -> None:
        """Join `membership`.

        Args:
            membership: of the fleet.
            checkpoint_address: 'host:port' of the checkpoint service; empty where there is none.
            is_this_host: tells whether a host is the machine that the gateway runs on.
        """
        self._membership = membership
        self._checkpoint_address = checkpoint_address
        self._is_this_host = is_this_host

    async def __call__(self, caller: Caller, report: ReplicaReport) -> Welcome:
        """Return the member, and where it finds the checkpoint service.

        Raises:
            ScopeMissing: the caller is no service of this deployment.
        """
        require_internal(caller)
        return Welcome(self._membership.register(report), await self._checkpoint_for(report))

    async def _checkpoint_for(self, report: ReplicaReport) -> str:
        """Return the address unless it would mean something else where the replica is: there it is its own host."""
        if not _is_loopback(_host_of(self._checkpoint_address)) or await self._is_this_host(_host_of(report.address)):
            return self._checkpoint_address
        _log.warning(
            'a replica of another host cannot reach the checkpoint service at a loopback address, and is not told it: '
            'set fleet.checkpoint_address of the gateway, or checkpoint_address of the replica',
            replica=report.replica_id,
            replica_address=report.address,
            checkpoint_address=self._checkpoint_address,
        )
        return ''


def _host_of(address: str) -> str:
    return address.rpartition(':')[0].removeprefix('[').removesuffix(']')


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == 'localhost'
