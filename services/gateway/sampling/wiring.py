"""Puts sampling that is answered later together: handles of weights, and who samples from them."""

from services.gateway.catalogue.weight_facts import GrpcWeightFacts
from services.gateway.forwarding.grpc_lookups import GrpcLookups
from services.gateway.futures.persistence import Persistence
from services.gateway.futures.sample import SamplePrompt
from services.gateway.futures.wiring import OpenFutures
from services.gateway.quotas.futures import SAMPLE_KIND, SampleTally
from services.gateway.sampling.convert import order_for_weights
from services.gateway.sampling.handles import SamplingHandles
from services.gateway.sampling.sampling_verbs import SamplingVerbs
from services.gateway.sampling.sql import SqlHandleStore
from services.gateway.store.database import Database
from services.kit.clock import Clock
from services.kit.rpc.context import acting_for, current_caller


def sampling_handles(
    database: Database,
    futures: OpenFutures,
    *,
    sampling: SamplingVerbs,
    lookups: GrpcLookups,
    tally: SampleTally,
    clock: Clock,
) -> SamplingHandles:
    """Return the handles, and let `futures` sample from them.

    Args:
        database: keeps them.
        futures: publish their versions, and carry requests out.
        sampling: the verbs that do it.
        lookups: ask the services that own the weights.
        tally: counts what samples took, once they are settled.
        clock: tells the time.
    """
    facts = GrpcWeightFacts(lookups)
    handles = SamplingHandles(SqlHandleStore(database), facts, futures.verbs, caller=current_caller, clock=clock)
    sample = SamplePrompt(sampling.sample_batch, handles, order_for_weights, Persistence(), acting_for=acting_for)
    sample.note = tally.note
    futures.executors[SAMPLE_KIND] = sample
    return handles
