"""Wires sampling to the fleet and to quotas."""

from twinkle_services.gateway.config import GatewayConfig
from twinkle_services.gateway.fleet.grpc import ReplicaChannels
from twinkle_services.gateway.fleet.members import Membership
from twinkle_services.gateway.fleet.upstreams import GrpcLookups
from twinkle_services.gateway.quotas.enforcement import SamplingGate
from twinkle_services.gateway.quotas.quotas import Quotas
from twinkle_services.gateway.sampling.dispatch import Dispatch
from twinkle_services.gateway.sampling.grpc import SamplerClient
from twinkle_services.gateway.sampling.sampling import Sampling


def open_sampling(
    config: GatewayConfig, membership: Membership, channels: ReplicaChannels, *, lookups: GrpcLookups, quotas: Quotas
) -> Sampling:
    """Return the sampling operations; their quota gate also admits the futures of sampling requests."""
    options = config.fleet
    dispatch = Dispatch(
        membership,
        replica_wait=options.replica_wait,
        begin_wait=options.begin_wait,
        waiting_per_tenant=options.waiting_per_tenant,
        weight_of=quotas.table.weight_of,
    )
    gate = SamplingGate(quotas.table, quotas.rates, patience=config.quotas.patience)
    samplers = SamplerClient(channels, lookups, internal_token=config.internal_token)
    return Sampling(dispatch, samplers, gate=gate, meter=quotas.meter)
