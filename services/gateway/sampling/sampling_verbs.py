"""The verbs of sampling, together."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from services.gateway.sampling.abort_sample import AbortSample
from services.gateway.sampling.batches import Batches
from services.gateway.sampling.broadcast import Broadcast
from services.gateway.sampling.compute_logprobs import ComputeLogprobs, Scores
from services.gateway.sampling.dispatch import Dispatch
from services.gateway.sampling.get_load import GetLoad
from services.gateway.sampling.list_resident_adapters import ListResidentAdapters
from services.gateway.sampling.load_adapter import LoadAdapter
from services.gateway.sampling.ports import Samplers
from services.gateway.sampling.routed_call import RoutedCall
from services.gateway.sampling.rules import BatchOrder, Piece, PromptAnswer, SampleOrder
from services.gateway.sampling.running_samples import RunningSamples
from services.gateway.sampling.sample import Sample
from services.gateway.sampling.sample_batch import SampleBatch
from services.gateway.sampling.watch_load import WatchLoad
from services.kit.caller import Caller


class SamplesPrompts(Protocol):
    """Streams the completions of one prompt, as `sample.Sample` does."""

    def __call__(
        self, caller: Caller, order: SampleOrder, *, deadline: float | None = None
    ) -> AsyncGenerator[Piece, None]:
        """Yield the pieces of the answer."""
        ...


class SamplesBatches(Protocol):
    """Completes many prompts, as `sample_batch.SampleBatch` does."""

    def __call__(
        self, caller: Caller, order: BatchOrder, *, deadline: float | None = None
    ) -> AsyncGenerator[PromptAnswer, None]:
        """Yield an answer for each prompt."""
        ...


class ComputesLogprobs(Protocol):
    """Scores given tokens, as `compute_logprobs.ComputeLogprobs` does."""

    async def __call__(self, caller: Caller, order: BatchOrder, *, deadline: float | None = None) -> Scores:
        """Return the answers, which together are about all sequences."""
        ...


@dataclass(frozen=True, kw_only=True)
class SamplingVerbs:
    """What the fleet of samplers can do."""

    sample: SamplesPrompts
    sample_batch: SamplesBatches
    compute_logprobs: ComputesLogprobs
    routed_call: RoutedCall
    load_adapter: LoadAdapter
    abort: AbortSample
    list_resident_adapters: ListResidentAdapters
    get_load: GetLoad
    watch_load: WatchLoad
    broadcast: Broadcast


def make_sampling_verbs(dispatch: Dispatch, samplers: Samplers) -> SamplingVerbs:
    """Return the verbs over `samplers`, found by `dispatch`."""
    requests = RunningSamples()
    batches = Batches(dispatch, samplers)
    broadcast = Broadcast(dispatch, samplers)
    routed_call = RoutedCall(dispatch, samplers)
    get_load = GetLoad(samplers, broadcast)
    return SamplingVerbs(
        sample=Sample(dispatch, samplers, requests),
        sample_batch=SampleBatch(batches, requests),
        compute_logprobs=ComputeLogprobs(batches),
        routed_call=routed_call,
        load_adapter=LoadAdapter(routed_call, dispatch.membership),
        abort=AbortSample(samplers, requests, broadcast),
        list_resident_adapters=ListResidentAdapters(samplers, broadcast),
        get_load=get_load,
        watch_load=WatchLoad(get_load, dispatch.membership),
        broadcast=broadcast,
    )
