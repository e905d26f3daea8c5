"""All verbs of the service, composed over one engine and one source of weights."""

from dataclasses import dataclass

from services.sampler.application.abort import Abort
from services.sampler.application.admission import Admission
from services.sampler.application.compute_logprobs import ComputeLogprobs
from services.sampler.application.generate import Generate
from services.sampler.application.get_load import GetLoad
from services.sampler.application.list_resident_adapters import ListResidentAdapters
from services.sampler.application.load_adapter import LoadAdapter
from services.sampler.application.pause import Pause
from services.sampler.application.reset_prefix_cache import ResetPrefixCache
from services.sampler.application.resume import Resume
from services.sampler.application.sample import Sample
from services.sampler.application.sample_batch import SampleBatch
from services.sampler.application.unload_adapter import UnloadAdapter
from services.sampler.application.version_store import VersionStore
from services.sampler.application.watch_load import WatchLoad
from services.sampler.domain.running_requests import RunningRequests
from services.sampler.ports import SamplerEngine, WeightSource


@dataclass(frozen=True, kw_only=True)
class Verbs:
    """What the servicer calls."""

    sample: Sample
    sample_batch: SampleBatch
    compute_logprobs: ComputeLogprobs
    abort: Abort
    list_resident_adapters: ListResidentAdapters
    load_adapter: LoadAdapter
    unload_adapter: UnloadAdapter
    get_load: GetLoad
    watch_load: WatchLoad
    reset_prefix_cache: ResetPrefixCache
    pause: Pause
    resume: Resume
    versions: VersionStore
    """To be closed when the service ends."""


def make_verbs(engine: SamplerEngine, source: WeightSource, *, max_resident_versions: int, queue_limit: int) -> Verbs:
    """Compose the verbs.

    Args:
        engine: samples.
        source: brings weights.
        max_resident_versions: adapter versions held at once.
        queue_limit: prompts of one tenant that may wait.
    """
    # Twice the sequences it runs keeps the engine's own queue filled, and the rest fair before it.
    places = 2 * engine.facts.max_sequences
    versions = VersionStore(engine, source, max_versions=max_resident_versions)
    admission = Admission(places=places, queue_limit=queue_limit)
    requests = RunningRequests()
    generate = Generate(engine, versions, admission, requests)
    abort = Abort(engine, admission, requests)
    get_load = GetLoad(engine, admission)
    return Verbs(
        sample=Sample(generate),
        sample_batch=SampleBatch(generate, max_concurrent_prompts=places),
        compute_logprobs=ComputeLogprobs(generate, max_concurrent_prompts=places),
        abort=abort,
        list_resident_adapters=ListResidentAdapters(versions),
        load_adapter=LoadAdapter(versions),
        unload_adapter=UnloadAdapter(versions),
        get_load=get_load,
        watch_load=WatchLoad(get_load),
        reset_prefix_cache=ResetPrefixCache(engine),
        pause=Pause(engine, admission, abort),
        resume=Resume(engine, admission),
        versions=versions,
    )
