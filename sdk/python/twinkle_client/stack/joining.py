"""Waiting for samplers to join the gateway's fleet, after which they receive requests."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import grpc

from twinkle.api.gateway.v1 import fleet_service_pb2 as pb
from twinkle.api.gateway.v1.fleet_service_pb2_grpc import FleetServiceStub
from twinkle_client.stack.hosts import StackError

JOIN_LIMIT_SECONDS = 60.0
_POLL_SECONDS = 0.05
_CALL_SECONDS = 10.0


def wait_until_joined(
    gateway: str, api_key: str, addresses: set[str], *, check: Callable[[], None], ca: str = ''
) -> None:
    """Wait until all samplers at the given addresses are ready in the fleet.

    Args:
        gateway: Address of the gateway, 'host:port'.
        api_key: API key with the scope 'operator'.
        addresses: Addresses of the samplers.
        check: Raises an error if a sampler has exited.
        ca: Path of the gateway's CA certificate. Empty: the gateway does not use TLS.

    Raises:
        StackError: A sampler exited, or did not join in time.
    """
    end = time.monotonic() + JOIN_LIMIT_SECONDS
    with _open(gateway, ca) as channel:
        while missing := addresses - _ready(channel, api_key):
            check()
            if time.monotonic() > end:
                raise StackError(
                    f'samplers at {", ".join(sorted(missing))} did not join the fleet of {gateway} within '
                    f'{JOIN_LIMIT_SECONDS:.0f} s; see their logs'
                )
            time.sleep(_POLL_SECONDS)


def _open(gateway: str, ca: str) -> grpc.Channel:
    if not ca:
        return grpc.insecure_channel(gateway)
    return grpc.secure_channel(gateway, grpc.ssl_channel_credentials(Path(ca).read_bytes()))


def _ready(channel: grpc.Channel, api_key: str) -> set[str]:
    request = pb.ListReplicasRequest(page_size=1000)
    metadata = (('authorization', f'Bearer {api_key}'),)
    # The generated stubs are typed for grpc.aio; on a synchronous channel the calls block.
    stub = FleetServiceStub(cast(Any, channel))
    try:
        response: Any = stub.ListReplicas(request, metadata=metadata, timeout=_CALL_SECONDS)
    except grpc.RpcError:
        # The gateway may not be ready yet; the caller enforces the time limit.
        return set()
    return {replica.address for replica in response.replicas if replica.state == pb.REPLICA_STATE_READY}
