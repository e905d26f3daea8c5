"""Puts sampling that is answered later together: handles of weights, and who samples from them."""

from services.gateway.api.convert_sampling import order_for_weights
from services.gateway.application.futures import Persistence, SamplePrompt
from services.gateway.application.quotas import SampleTally
from services.gateway.application.quotas.futures import SAMPLE_KIND
from services.gateway.application.sampling_handles import SamplingHandles
from services.gateway.application.sampling_verbs import SamplingVerbs
from services.gateway.assembly.futures import OpenFutures
from services.gateway.backends.grpc_lookups import GrpcLookups
from services.gateway.backends.sql import Database, SqlHandleStore
from services.gateway.backends.weight_facts import GrpcWeightFacts
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
