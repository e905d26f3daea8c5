"""Opens the feature: sampling over the fleet, with and without quotas."""

from services.gateway.config import GatewayConfig
from services.gateway.fleet.grpc import ReplicaChannels
from services.gateway.fleet.members import Membership
from services.gateway.quotas.wiring import OpenQuotas
from services.gateway.sampling.dispatch import Dispatch
from services.gateway.sampling.grpc import GrpcSamplers
from services.gateway.sampling.limits import SamplePlaces, SamplingGate, limited_sampling
from services.gateway.sampling.sampling_verbs import SamplingVerbs, make_sampling_verbs


def open_sampling(
    config: GatewayConfig, membership: Membership, channels: ReplicaChannels, *, quotas: OpenQuotas
) -> tuple[SamplingVerbs, SamplingVerbs, SamplingGate]:
    """Return the verbs without quotas, the verbs within quotas, and the gate that admits requests."""
    options = config.fleet
    dispatch = Dispatch(
        membership,
        replica_wait=options.replica_wait,
        begin_wait=options.begin_wait,
        waiting_per_tenant=options.waiting_per_tenant,
        weight_of=quotas.book.weight_of,
    )
    verbs = make_sampling_verbs(dispatch, GrpcSamplers(channels, internal_token=config.internal_token))
    gate = SamplingGate(quotas.book, quotas.rates, SamplePlaces(), patience=config.quotas.patience)
    return verbs, limited_sampling(verbs, gate, quotas.meter), gate
