"""All verbs of the service, composed over one engine and one source of weights."""

from dataclasses import dataclass

from services.kit.weights import Sender
from services.kit.worker import Threads
from services.sampler.application.abort import Abort
from services.sampler.application.admission import Admission
from services.sampler.application.compute_logprobs import ComputeLogprobs
from services.sampler.application.describe_tokens import DescribeTokens
from services.sampler.application.followed_run import FollowedRun
from services.sampler.application.generate import Generate
from services.sampler.application.get_load import GetLoad
from services.sampler.application.list_resident_adapters import ListResidentAdapters
from services.sampler.application.load_adapter import LoadAdapter
from services.sampler.application.pause import Pause
from services.sampler.application.relay import Relay
from services.sampler.application.report import Report
from services.sampler.application.reset_prefix_cache import ResetPrefixCache
from services.sampler.application.resume import Resume
from services.sampler.application.sample import Sample
from services.sampler.application.sample_batch import SampleBatch
from services.sampler.application.sleep import Sleep
from services.sampler.application.unload_adapter import UnloadAdapter
from services.sampler.application.version_store import VersionStore
from services.sampler.application.versions import Retention, Versions
from services.sampler.application.wake_up import WakeUp
from services.sampler.application.watch_load import WatchLoad
from services.sampler.domain.running_requests import RunningRequests
from services.sampler.ports import SamplerEngine, WeightSource


@dataclass(frozen=True, kw_only=True)
class Verbs:
    """What the servicer calls."""

    sample: Sample
    sample_batch: SampleBatch
    compute_logprobs: ComputeLogprobs
    describe_tokens: DescribeTokens
    abort: Abort
    list_resident_adapters: ListResidentAdapters
    load_adapter: LoadAdapter
    unload_adapter: UnloadAdapter
    get_load: GetLoad
    watch_load: WatchLoad
    reset_prefix_cache: ResetPrefixCache
    pause: Pause
    resume: Resume
    sleep: Sleep
    wake_up: WakeUp
    relay: Relay
    report: Report
    admission: Admission
    versions: Versions
    """To be started when the service begins and closed when it ends."""


def make_verbs(
    engine: SamplerEngine,
    source: WeightSource,
    *,
    retention: Retention | None = None,
    queue_limit: int,
    is_base_prefix_shared: bool = False,
    host_id: str = '',
) -> Verbs:
    """Compose the verbs.

    Args:
        engine: samples.
        source: brings weights.
        retention: how many versions are held and adapters followed.
        queue_limit: prompts of one tenant that may wait.
        is_base_prefix_shared: whether tenants share cached prefixes of the base model.
        host_id: of the memory this process shares with others of its host; empty: none.
    """
    # Twice the sequences it runs keeps the engine's own queue filled, and the rest fair before it.
    places = 2 * engine.facts.max_sequences
    versions = _make_versions(engine, source, retention or Retention())
    admission = Admission(places=places, queue_limit=queue_limit)
    requests = RunningRequests()
    generate = Generate(engine, versions, admission, requests, is_base_prefix_shared=is_base_prefix_shared)
    abort = Abort(engine, admission, requests)
    get_load = GetLoad(engine, admission)
    return Verbs(
        sample=Sample(generate),
        sample_batch=SampleBatch(generate, max_concurrent_prompts=places),
        compute_logprobs=ComputeLogprobs(generate, max_concurrent_prompts=places),
        describe_tokens=DescribeTokens(engine),
        abort=abort,
        list_resident_adapters=ListResidentAdapters(versions),
        load_adapter=LoadAdapter(versions),
        unload_adapter=UnloadAdapter(versions),
        get_load=get_load,
        watch_load=WatchLoad(get_load),
        reset_prefix_cache=ResetPrefixCache(engine),
        pause=Pause(engine, admission, abort),
        resume=Resume(engine, admission),
        sleep=Sleep(engine, admission),
        wake_up=WakeUp(engine, admission),
        relay=Relay(versions, Sender(Threads('relay', count=1)), host_id=host_id),
        report=Report(engine.facts, get_load, versions, retention.followed_run if retention else None),
        admission=admission,
        versions=versions,
    )


def _make_versions(engine: SamplerEngine, source: WeightSource, retention: Retention) -> Versions:
    if retention.followed_run is not None:
        return FollowedRun(engine, source, retention.followed_run)
    return VersionStore(engine, source, retention)
