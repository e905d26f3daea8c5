"""Routing of requests to replicas: balance, locality, and replicas that must not be chosen."""

import random
from collections import Counter
from datetime import UTC, datetime

from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle_services.gateway.fleet.rules import Replica, ReplicaLoad, ReplicaReport, ReplicaState
from twinkle_services.gateway.fleet.sampler_choice import (
    AdapterRequest,
    LoadTable,
    PrefixMemory,
    RouteKey,
    block_keys,
    candidates,
    choose,
)

MOMENT = datetime(2026, 1, 1, tzinfo=UTC)


def replica(name: str, *, running: int = 0, max_running: int = 64, state: ReplicaState = ReplicaState.READY) -> Replica:
    """Return a replica in the given state, with the given load."""
    load = ReplicaLoad(running_sequence_count=running, max_sequence_count=max_running)
    report = ReplicaReport(replica_id=name, service='sampler', address=name, base_models=('m',), load=load)
    return Replica(report=report, state=state, heartbeat_time=MOMENT, join_time=MOMENT)


class Router:
    """Router that chooses replicas as the gateway does."""

    def __init__(self, residents: dict[str, dict[str, list[int]]] | None = None) -> None:
        self.loads, self.memory = LoadTable(), PrefixMemory()
        self._residents = residents or {}

    def choose(self, key: RouteKey, members: list[Replica]) -> str:
        """Return the id of the chosen replica."""
        chosen = choose(key, members, loads=self.loads, memory=self.memory, versions_at=self._versions_at)
        assert chosen is not None
        return chosen.replica_id

    def _versions_at(self, replica_id: str, adapter_id: str) -> list[int]:
        return self._residents.get(replica_id, {}).get(adapter_id, [])


def key_of(text: str, *, adapter: AdapterRequest | None = None, weight: int = 1) -> RouteKey:
    """Return the routing key of a prompt."""
    name = adapter.adapter_id if adapter else ''
    return RouteKey(base_model='m', adapter=adapter, blocks=block_keys('m', name, text.encode()), weight=weight)


@given(st.integers(2, 12), st.integers(0, 1 << 30))
@settings(max_examples=30)
def test_open_requests_spread_evenly(count: int, seed: int) -> None:
    """No replica has more open requests than 1.25 times the average plus two, although prompts repeat."""
    router, generator = Router(), random.Random(seed)
    members = [replica(f'r{index}', max_running=1000) for index in range(count)]
    open_counts: Counter[str] = Counter()
    for _ in range(40 * count):
        chosen = router.choose(key_of(f'prompt {generator.randrange(10)}' * 50), members)
        router.loads.begin(chosen, 1)
        open_counts[chosen] += 1
        assert max(open_counts.values()) <= 1.25 * (open_counts.total() / count) + 2


@given(st.integers(2, 10))
@settings(max_examples=20)
def test_only_keys_of_a_joining_or_leaving_replica_are_rerouted(count: int) -> None:
    """When a replica joins or leaves, only its keys are rerouted, and they are at most 2.5 times its fair share."""
    members = [replica(f'r{index}') for index in range(count + 1)]
    keys = [key_of(f'prompt {index}') for index in range(300)]
    before = [Router().choose(key, members[:-1]) for key in keys]
    after = [Router().choose(key, members) for key in keys]
    rerouted = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(rerouted) <= {members[-1].replica_id}
    assert len(rerouted) <= 2.5 * len(keys) / (count + 1)


@given(st.lists(st.tuples(st.integers(0, 8), st.sampled_from(list(ReplicaState))), min_size=1, max_size=8), st.text())
@settings(max_examples=200)
def test_full_and_draining_replicas_are_not_chosen_while_another_is_free(
    members: list[tuple[int, ReplicaState]], text: str
) -> None:
    """A full or draining replica is not chosen for its affinity or loaded versions while another replica is free."""
    adapter = AdapterRequest(adapter_id='x')
    fleet = [
        replica(f'r{i}', running=running, max_running=4, state=state) for i, (running, state) in enumerate(members)
    ]
    router = Router(
        {member.replica_id: {'x': [1]} for member in fleet if member.report.load.running_sequence_count > 3}
    )
    eligible = candidates(key_of(text, adapter=adapter), fleet)
    assert all(member.state is not ReplicaState.DRAINING for member in eligible)
    if not eligible:
        return
    chosen = router.choose(key_of(text, adapter=adapter), eligible)
    running = {member.replica_id: member.report.load.running_sequence_count for member in eligible}
    if min(running.values()) < 4:
        assert running[chosen] < 4


def test_request_goes_to_a_replica_that_holds_its_version() -> None:
    """Exact, minimum and unspecified versions each select a replica with a matching version."""
    members = [replica(f'r{index}') for index in range(5)]
    router = Router({'r1': {'x': [1]}, 'r2': {'x': [1, 2]}, 'r3': {'y': [7]}})
    for index in range(20):
        chosen = {
            adapter: router.choose(key_of(f'{index}', adapter=adapter), members)
            for adapter in (
                AdapterRequest(adapter_id='x', exact=2),
                AdapterRequest(adapter_id='x', at_least=2),
                AdapterRequest(adapter_id='x'),
                AdapterRequest(adapter_id='y'),
            )
        }
        assert list(chosen.values()) == ['r2', 'r2', 'r2', 'r3']
        assert router.choose(key_of(f'{index}', adapter=AdapterRequest(adapter_id='x', exact=1)), members) in {
            'r1',
            'r2',
        }


def test_turns_of_a_chat_reach_the_same_replica() -> None:
    """A prompt that extends an earlier prompt reaches the same replica, even after another replica has joined."""
    router = Router()
    members = [replica(f'r{index}') for index in range(4)]
    text = 'a shared system prompt ' * 20
    first_choice: dict[int, str] = {}
    for turn in range(5):
        for chat in range(8):
            key = key_of(text + f'chat {chat} continues ' * (20 * (turn + 1)))
            chosen = router.choose(key, members)
            first_choice.setdefault(chat, chosen)
            assert chosen == first_choice[chat]
        members = [*members, replica(f'new{turn}')]


def test_shared_prefix_does_not_overload_one_replica() -> None:
    """Requests with one shared prefix go to other replicas once the preferred replica has its fair share."""
    router = Router()
    members = [replica(f'r{index}') for index in range(2)]
    for _ in range(32):
        router.loads.begin(router.choose(key_of('the same prompt' * 40), members), 1)
    counts = sorted(router.loads.sequences_at(member) for member in members)
    assert sum(counts) == 32
    assert counts[1] <= 21


def test_load_combines_the_report_and_later_changes() -> None:
    """A report replaces the counts of earlier requests, but the load is never below the number of open requests."""
    loads = LoadTable()
    member = replica('r', running=3)
    loads.begin('r', 4)
    assert loads.sequences_at(member) == 7
    loads.reported('r')
    assert loads.sequences_at(member) == 4
    loads.end('r', 2)
    assert loads.sequences_at(replica('r', running=7)) == 5
    loads.end('r', 2)
    assert loads.sequences_at(replica('r', running=0)) == 0


def test_load_of_departed_replicas_is_dropped() -> None:
    """The load of a departed replica is deleted once its requests have finished."""
    loads = LoadTable()
    for number in range(100):
        loads.begin(f'r-{number}', 1)
    loads.keep_only({'r-1'})
    assert loads.sequences_at(replica('r-5', running=0)) == 1
    for number in range(100):
        loads.end(f'r-{number}', 1)
    loads.keep_only({'r-1'})
    assert len(loads) == 1


@given(st.binary(max_size=2000), st.binary(max_size=600))
def test_keys_of_a_prefix_are_a_prefix_of_the_keys(data: bytes, more: bytes) -> None:
    """A longer prompt keeps the keys of its full blocks, and the same prompt has different keys for another adapter."""
    keys, longer = block_keys('m', '', data), block_keys('m', '', data + more)
    full_blocks = len(data) // 256
    assert keys[:full_blocks] == longer[:full_blocks]
    assert set(keys).isdisjoint(block_keys('m', 'x', data))


def test_memory_of_prefixes_is_bounded() -> None:
    """The least recently used prefix blocks are removed first."""
    memory = PrefixMemory(capacity=10)
    for block in range(100):
        memory.note([block], 'r')
    assert [block for block in range(100) if memory.find([block], {'r'})] == list(range(90, 100))
