"""Waits until the samplers of a stack are in the fleet: from then on the gateway sends them requests."""

import time
from pathlib import Path
from typing import Any, cast

import grpc

from twinkle.api.gateway.v1 import fleet_service_pb2 as pb
from twinkle.api.gateway.v1.fleet_service_pb2_grpc import FleetServiceStub
from twinkle_client.stack.spawning import StackError

JOIN_LIMIT_SECONDS = 60.0
_POLL_SECONDS = 0.05
_CALL_SECONDS = 10.0


def wait_until_joined(gateway: str, api_key: str, addresses: set[str], *, ca: str = '') -> None:
    """Return once every sampler at these addresses is ready in the fleet.

    Args:
        gateway: 'host:port'.
        api_key: with the scope 'operator'.
        addresses: of the samplers.
        ca: PEM file of the gateway's authority; empty: it speaks no TLS.

    Raises:
        StackError: one did not join in time.
    """
    end = time.monotonic() + JOIN_LIMIT_SECONDS
    with _open(gateway, ca) as channel:
        while missing := addresses - _ready(channel, api_key):
            if time.monotonic() > end:
                raise StackError(f'samplers at {", ".join(sorted(missing))} did not join the fleet of {gateway}')
            time.sleep(_POLL_SECONDS)


def _open(gateway: str, ca: str) -> grpc.Channel:
    if not ca:
        return grpc.insecure_channel(gateway)
    return grpc.secure_channel(gateway, grpc.ssl_channel_credentials(Path(ca).read_bytes()))


def _ready(channel: grpc.Channel, api_key: str) -> set[str]:
    request = pb.ListReplicasRequest(page_size=1000)
    metadata = (('authorization', f'Bearer {api_key}'),)
    # The generated stubs are typed for grpc.aio; on a plain channel the same calls block.
    stub = FleetServiceStub(cast(Any, channel))
    try:
        answer: Any = stub.ListReplicas(request, metadata=metadata, timeout=_CALL_SECONDS)
    except grpc.RpcError:
        # A gateway that has just begun to listen; the time limit is the caller's.
        return set()
    return {replica.address for replica in answer.replicas if replica.state == pb.REPLICA_STATE_READY}
