"""Converts messages of the fleet contract from and to values, and checks the fields of requests.

Functions raise InvalidField if a field is invalid; the error names it.
"""

import ipaddress
import re
from urllib.parse import unquote

from twinkle.api.gateway.v1 import fleet_service_pb2 as wire
from twinkle.api.sampler.v1 import engine_pb2
from twinkle_services.gateway.fleet.replicas import FleetEvent, LeaseTerms
from twinkle_services.gateway.fleet.rules import Replica, ReplicaLoad, ReplicaReport, ReplicaState, ResidentAdapter
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.rpc.fields import (
    MAX_ID_LENGTH,
    duration_to_proto,
    id_from_proto,
    text_from_proto,
    timestamp_to_proto,
)

MAX_BASE_MODELS = 64
MAX_RESIDENT_ADAPTERS = 4096

_SERVICES = ('model', 'sampler', 'data', 'checkpoint')
_STATES = {
    ReplicaState.READY: wire.REPLICA_STATE_READY,
    ReplicaState.DRAINING: wire.REPLICA_STATE_DRAINING,
    ReplicaState.LOST: wire.REPLICA_STATE_LOST,
}
_HOST_NAME = re.compile(r'(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*\.?')


def report_from_proto(message: wire.Replica, *, peer: str) -> ReplicaReport:
    """Convert a replica's report; `peer` is gRPC's description of the caller."""
    if message.service not in _SERVICES:
        raise InvalidField('replica.service', f'must be one of {", ".join(_SERVICES)}, got {message.service[:80]!r}')
    if len(message.base_models) > MAX_BASE_MODELS:
        raise InvalidField('replica.base_models', f'has {len(message.base_models)} names, more than {MAX_BASE_MODELS}')
    if len(message.resident_adapters) > MAX_RESIDENT_ADAPTERS:
        raise InvalidField('replica.resident_adapters', f'must have at most {MAX_RESIDENT_ADAPTERS} entries')
    return ReplicaReport(
        replica_id=id_from_proto(message.replica_id, 'replica.replica_id'),
        service=message.service,
        address=address_from_proto(message.address, peer=peer),
        base_models=tuple(
            id_from_proto(name, f'replica.base_models[{index}]') for index, name in enumerate(message.base_models)
        ),
        is_draining=message.state == wire.REPLICA_STATE_DRAINING,
        resident_adapters=tuple(map(resident_from_proto, message.resident_adapters)),
        load=load_from_proto(message.load) if message.HasField('load') else None,
        engine=text_from_proto(message.engine, 'replica.engine', limit=MAX_ID_LENGTH),
        followed_run=text_from_proto(message.followed_run, 'replica.followed_run', limit=MAX_ID_LENGTH),
    )


def address_from_proto(address: str, *, peer: str) -> str:
    """Return the 'host:port' at which the gateway reaches a replica; the host of `peer` replaces 0.0.0.0 and [::].

    An address that is reachable only from the replica's host is invalid.
    """
    host, _, port = address.rpartition(':')
    bare = host.removeprefix('[').removesuffix(']')
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise InvalidField('replica.address', f'must be host:port with a port of 1 to 65535, got {address[:80]!r}')
    peer_host = _peer_host(peer)
    try:
        number = ipaddress.ip_address(bare)
    except ValueError as error:
        if ':' in host or len(host) > 253 or not _HOST_NAME.fullmatch(host):
            raise InvalidField('replica.address', f'{host[:80]!r} is neither a host name nor an IP address') from error
        return f'{host}:{int(port)}'
    if (number.version == 6) != host.startswith('['):
        raise InvalidField('replica.address', 'must have brackets around an IPv6 host only, as in [::1]:9000')
    if number.is_unspecified:
        number = peer_host or ipaddress.ip_address('127.0.0.1')
    elif number.is_loopback and peer_host is not None and not peer_host.is_loopback:
        problem = f'{bare} is reachable only from its host; configure another listen address'
        raise InvalidField('replica.address', problem)
    return f'[{number}]:{int(port)}' if number.version == 6 else f'{number}:{int(port)}'


def replica_to_proto(replica: Replica) -> wire.Replica:
    report = replica.report
    return wire.Replica(
        replica_id=report.replica_id,
        service=report.service,
        address=report.address,
        base_models=report.base_models,
        state=_STATES[replica.state],
        resident_adapters=[engine_pb2.ResidentAdapter(**vars(item)) for item in report.resident_adapters],
        load=load_to_proto(report.load) if report.load else None,
        heartbeat_time=timestamp_to_proto(replica.heartbeat_time),
        engine=report.engine,
        join_time=timestamp_to_proto(replica.join_time),
        is_static=replica.is_static,
        followed_run=report.followed_run,
    )


def event_to_proto(event: FleetEvent) -> wire.WatchFleetResponse:
    if event.replica is not None:
        return wire.WatchFleetResponse(replica=replica_to_proto(event.replica), resume_token=event.resume_token)
    if event.left_replica_id:
        return wire.WatchFleetResponse(left_replica_id=event.left_replica_id, resume_token=event.resume_token)
    return wire.WatchFleetResponse(is_synced=True, resume_token=event.resume_token)


def terms_to_proto(terms: LeaseTerms) -> wire.LeaseResponse:
    return wire.LeaseResponse(
        lease_interval=duration_to_proto(terms.duration),
        is_drain_requested=terms.is_drain_requested,
        weight_source_address=terms.weight_source_address,
    )


def resident_from_proto(message: engine_pb2.ResidentAdapter) -> ResidentAdapter:
    return ResidentAdapter(
        adapter_id=message.adapter_id,
        version=message.version,
        size_bytes=message.size_bytes,
        sequence_count=message.sequence_count,
    )


def load_from_proto(message: engine_pb2.EngineLoad) -> ReplicaLoad:
    """Convert an engine's load; negative counts become zero."""
    return ReplicaLoad(
        running_sequence_count=max(message.running_sequence_count, 0),
        waiting_sequence_count=max(message.waiting_sequence_count, 0),
        kv_usage=message.kv_usage,
        tokens_per_second=message.tokens_per_second,
        prefix_hit_rate=message.prefix_hit_rate,
        is_paused=message.is_paused,
        max_sequence_count=max(message.max_sequence_count, 0),
        is_sleeping=message.is_sleeping,
    )


def load_to_proto(load: ReplicaLoad) -> engine_pb2.EngineLoad:
    return engine_pb2.EngineLoad(**vars(load))


def _peer_host(peer: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address in gRPC's description of a peer, such as 'ipv4:10.0.0.1:5' or 'ipv6:%5B::1%5D:5', or None."""
    kind, _, rest = unquote(peer).partition(':')
    if kind not in {'ipv4', 'ipv6'}:
        return None
    try:
        return ipaddress.ip_address(rest.rpartition(':')[0].removeprefix('[').removesuffix(']'))
    except ValueError:
        return None
