"""Rules of the sampler service: fair queues, eviction of versions, and lookup of running requests."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle.data_format import PromptProbe, SamplingParams
from twinkle_services.kit.errors import InvalidField
from twinkle_services.sampler.domain.adapter import AdapterKey, CheckpointFacts, VersionKey
from twinkle_services.sampler.domain.errors import ContextExceeded, RequestIdTaken, RequestNotFound
from twinkle_services.sampler.domain.fair_queue import FairQueue
from twinkle_services.sampler.domain.generation import MAX_EXPERT_BYTES, EngineFacts, check_fits
from twinkle_services.sampler.domain.residency import Residency, ResidentVersion
from twinkle_services.sampler.domain.running_requests import RunningRequests

FACTS = EngineFacts(
    base_model='tiny', context_tokens=10, vocabulary_size=320, parameter_count=1, dtype='float32', max_sequences=2
)


def test_experts_are_limited_by_their_size() -> None:
    """A request for experts is refused if the engine cannot report experts, or if their data are too large."""
    params = SamplingParams(max_tokens=1, num_samples=2, return_routed_experts=True)
    with pytest.raises(InvalidField, match=r'is_routed_experts_returned.*torch engine'):
        check_fits(2, params, FACTS)
    largest = MAX_EXPERT_BYTES // 6
    check_fits(2, params, replace(FACTS, expert_token_bytes=largest))
    with pytest.raises(InvalidField, match=r'is_routed_experts_returned.*reduce sample_count'):
        check_fits(2, params, replace(FACTS, expert_token_bytes=largest + 1))


def key(name: str, version: int = 1, tenant: str = 'alice') -> VersionKey:
    return VersionKey(AdapterKey(tenant, name), version)


def resident(version: VersionKey) -> ResidentVersion:
    """Return a version that is loaded."""
    return ResidentVersion(key=version, size_bytes=1, digest='')


@given(st.lists(st.sampled_from('abc'), max_size=30))
def test_tenants_take_turns_and_items_keep_their_order(arrivals):
    """Items of a tenant keep their order; between two of them, no other tenant is served twice."""
    queue = FairQueue[tuple[str, int]]()
    for position, tenant in enumerate(arrivals):
        queue.push(tenant, (tenant, position))
    popped = [queue.pop() for _ in arrivals]
    for tenant in 'abc':
        positions = [position for name, position in popped if name == tenant]
        assert positions == sorted(positions)
    for first in range(len(popped)):
        tenant = popped[first][0]
        later = [index for index in range(first + 1, len(popped)) if popped[index][0] == tenant]
        between = [name for name, _ in popped[first + 1 : later[0]]] if later else []
        assert len(between) == len(set(between))
    with pytest.raises(IndexError):
        queue.pop()


def test_discarded_item_is_not_popped():
    """A discarded item is not popped, and discarding it again returns False."""
    queue = FairQueue[int]()
    queue.push('a', 1)
    queue.push('a', 2)
    assert queue.discard('a', 1)
    assert not queue.discard('a', 1)
    assert (queue.pop(), len(queue)) == (2, 0)


def test_least_recently_used_version_is_evicted_first():
    """The least recently used version is evicted first, and only as many as needed are evicted."""
    residency = Residency(2)
    for name in ('a', 'b'):
        assert residency.evict_for() == []
        residency.add(resident(key(name)))
    residency.use(residency.get(key('a')))
    residency.release(residency.get(key('a')))
    assert residency.evict_for() == [key('b')]
    residency.add(resident(key('c')))
    assert residency.evict_for() == [key('a')]


def test_versions_in_use_are_not_evicted():
    """A version in use is not evicted; with all versions in use nothing is evicted."""
    residency = Residency(1)
    version = resident(key('a'))
    residency.add(version)
    residency.use(version)
    assert residency.evict_for() is None
    assert residency.get(key('a')) is version
    residency.release(version)
    assert residency.evict_for() == [key('a')]


def test_publishing_does_not_count_as_use():
    """A new version of an adapter does not count as a use of the adapter."""
    residency = Residency(3)
    residency.add(resident(key('idle', 1)))
    residency.add(resident(key('busy', 1)))
    residency.add(resident(key('idle', 2)))
    assert residency.evict_for()[0].adapter.name == 'idle'
    assert residency.newest(AdapterKey('alice', 'busy')) is not None


def test_tenants_see_their_own_versions():
    """Adapters of two tenants with the same id are different adapters."""
    residency = Residency(4)
    residency.add(resident(key('a', 2)))
    residency.add(resident(key('a', 1)))
    residency.add(resident(key('a', 5, tenant='bob')))
    assert [item.key.version for item in residency.of_tenant('alice')] == [1, 2]
    assert residency.evict_adapter(AdapterKey('alice', 'a')) == [key('a', 1), key('a', 2)]
    assert [item.key.version for item in residency.of_tenant('bob')] == [5]


def test_replaced_checkpoint_is_another_key():
    """Two checkpoints that were saved with one path have different keys."""
    first, second = (CheckpointFacts(path='p', digest=digest, step_count=0) for digest in 'ab')
    assert first.version_key('alice') != second.version_key('alice')
    assert first.version_key('alice').version == 1


def test_requests_are_found_only_by_their_tenant():
    """A request id is unique per tenant while the request runs, and only its tenant finds the request."""
    requests = RunningRequests()
    request = requests.begin('alice', 'r')
    with pytest.raises(RequestIdTaken):
        requests.begin('alice', 'r')
    requests.begin('bob', 'r')
    with pytest.raises(RequestNotFound):
        requests.find('carol', 'r')
    assert requests.find('alice', 'r') is request
    requests.end(request)
    with pytest.raises(RequestNotFound):
        requests.find('alice', 'r')


@pytest.mark.parametrize(
    ('prompt_tokens', 'params', 'error'),
    [
        (9, {}, None),
        (10, {'max_tokens': 0}, None),
        (10, {}, ContextExceeded),
        (5, {'max_tokens': 6}, ContextExceeded),
        (5, {'min_tokens': 6}, InvalidField),
        (5, {'max_tokens': 2, 'min_tokens': 3}, InvalidField),
    ],
)
def test_prompt_beyond_the_context_is_refused(prompt_tokens, params, error):
    """A prompt is refused if it and its new tokens exceed the context, or if `min_tokens` is unreachable."""
    if error is None:
        check_fits(prompt_tokens, SamplingParams(**params), FACTS)
    else:
        with pytest.raises(error):
            check_fits(prompt_tokens, SamplingParams(**params), FACTS)


@pytest.mark.parametrize(
    ('prompt_tokens', 'probe', 'field'),
    [
        (4, PromptProbe(target_token_ids=np.zeros((3, 1), np.int32)), ''),
        (4, PromptProbe(target_token_ids=np.zeros((4, 1), np.int32)), 'target_token_ids'),
        (4, PromptProbe(target_token_ids=np.full((3, 1), -2, np.int32)), 'target_token_ids'),
        (4, PromptProbe(target_token_ids=np.full((3, 1), FACTS.vocabulary_size, np.int32)), 'target_token_ids'),
        (513, PromptProbe(draw_count=128), ''),
        (514, PromptProbe(draw_count=128), 'draw_count'),
    ],
)
def test_probe_that_does_not_fit_a_prompt_is_refused(prompt_tokens, probe, field):
    """A probe is refused if its rows, tokens or number of drawn tokens do not fit the prompt and the model."""
    facts, params = replace(FACTS, context_tokens=1024), SamplingParams(max_tokens=1, prompt_probe=probe)
    if not field:
        check_fits(prompt_tokens, params, facts)
        return
    with pytest.raises(InvalidField) as refusal:
        check_fits(prompt_tokens, params, facts)
    assert refusal.value.field == f'params.prompt_probe.{field}'
