"""Who gets a request: balance, locality, and what may never happen."""

import random
from collections import Counter
from datetime import UTC, datetime

from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.fleet.routing import (
    AdapterWish,
    LoadBook,
    PrefixMemory,
    RouteKey,
    block_keys,
    candidates,
    choose,
)
from services.gateway.fleet.rules import Replica, ReplicaLoad, ReplicaReport, ReplicaState

MOMENT = datetime(2026, 1, 1, tzinfo=UTC)


def replica(name: str, *, running: int = 0, most: int = 64, state: ReplicaState = ReplicaState.READY) -> Replica:
    """Return a member."""
    load = ReplicaLoad(running_sequence_count=running, max_sequence_count=most)
    report = ReplicaReport(replica_id=name, service='sampler', address=name, base_models=('m',), load=load)
    return Replica(report=report, state=state, heartbeat_time=MOMENT, join_time=MOMENT)


class Router:
    """Chooses as the gateway does."""

    def __init__(self, residents: dict[str, dict[str, list[int]]] | None = None) -> None:
        """Know where adapters are."""
        self.book, self.memory = LoadBook(), PrefixMemory()
        self._residents = residents or {}

    def choose(self, key: RouteKey, members: list[Replica]) -> str:
        """Return the id of the one chosen."""
        chosen = choose(key, members, book=self.book, memory=self.memory, versions_at=self._versions_at)
        assert chosen is not None
        return chosen.replica_id

    def _versions_at(self, replica_id: str, adapter_id: str) -> list[int]:
        return self._residents.get(replica_id, {}).get(adapter_id, [])


def key_of(text: str, *, adapter: AdapterWish | None = None, weight: int = 1) -> RouteKey:
    """Return the key of a prompt."""
    name = adapter.adapter_id if adapter else ''
    return RouteKey(base_model='m', adapter=adapter, blocks=block_keys('m', name, text.encode()), weight=weight)


@given(st.integers(2, 12), st.integers(0, 1 << 30))
@settings(max_examples=30, deadline=None)
def test_open_requests_spread_evenly(count: int, seed: int) -> None:
    """Whatever the prompts, alike or not, nobody has more than its share and a quarter, and two more."""
    router, generator = Router(), random.Random(seed)
    members = [replica(f'r{index}', most=1000) for index in range(count)]
    open_counts: Counter[str] = Counter()
    for _ in range(40 * count):
        chosen = router.choose(key_of(f'prompt {generator.randrange(10)}' * 50), members)
        router.book.begin(chosen, 1)
        open_counts[chosen] += 1
        assert max(open_counts.values()) <= 1.25 * (open_counts.total() / count) + 2


@given(st.integers(2, 10))
@settings(max_examples=20, deadline=None)
def test_only_keys_of_who_joins_or_leaves_move(count: int) -> None:
    """A new member takes about its share and nothing moves between the others; the same backwards."""
    members = [replica(f'r{index}') for index in range(count + 1)]
    keys = [key_of(f'prompt {index}') for index in range(300)]
    before = [Router().choose(key, members[:-1]) for key in keys]
    after = [Router().choose(key, members) for key in keys]
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) <= {members[-1].replica_id}
    assert len(moved) <= 2.5 * len(keys) / (count + 1)


@given(st.lists(st.tuples(st.integers(0, 8), st.sampled_from(list(ReplicaState))), min_size=1, max_size=8), st.text())
@settings(max_examples=200, deadline=None)
def test_full_and_leaving_replicas_get_nothing_while_another_is_free(
    members: list[tuple[int, ReplicaState]], text: str
) -> None:
    """Neither affinity nor residency sends a request to one that is full or draining while another is free."""
    adapter = AdapterWish(adapter_id='x')
    fleet = [replica(f'r{i}', running=running, most=4, state=state) for i, (running, state) in enumerate(members)]
    router = Router(
        {member.replica_id: {'x': [1]} for member in fleet if member.report.load.running_sequence_count > 3}
    )
    fit = candidates(key_of(text, adapter=adapter), fleet)
    assert all(member.state is not ReplicaState.DRAINING for member in fit)
    if not fit:
        return
    chosen = router.choose(key_of(text, adapter=adapter), fit)
    running = {member.replica_id: member.report.load.running_sequence_count for member in fit}
    if min(running.values()) < 4:
        assert running[chosen] < 4


def test_request_goes_where_its_version_is() -> None:
    """Exactly that version, at least that version, or the newest of those that are resident."""
    members = [replica(f'r{index}') for index in range(5)]
    router = Router({'r1': {'x': [1]}, 'r2': {'x': [1, 2]}, 'r3': {'y': [7]}})
    for index in range(20):
        chosen = {
            wish: router.choose(key_of(f'{index}', adapter=wish), members)
            for wish in (
                AdapterWish(adapter_id='x', exact=2),
                AdapterWish(adapter_id='x', at_least=2),
                AdapterWish(adapter_id='x'),
                AdapterWish(adapter_id='y'),
            )
        }
        assert list(chosen.values()) == ['r2', 'r2', 'r2', 'r3']
        assert router.choose(key_of(f'{index}', adapter=AdapterWish(adapter_id='x', exact=1)), members) in {'r1', 'r2'}


def test_turns_of_a_chat_meet_their_cache() -> None:
    """What continues a prompt goes where the prompt went, also after another member joined."""
    router = Router()
    members = [replica(f'r{index}') for index in range(4)]
    text = 'a system prompt that all share ' * 20
    homes: dict[int, str] = {}
    for turn in range(5):
        for chat in range(8):
            key = key_of(text + f'chat {chat} says at length ' * (20 * (turn + 1)))
            chosen = router.choose(key, members)
            homes.setdefault(chat, chosen)
            assert chosen == homes[chat]
        members = [*members, replica(f'new{turn}')]


def test_busy_home_hands_over() -> None:
    """Prefixes that all share do not all end up at one replica."""
    router = Router()
    members = [replica(f'r{index}') for index in range(2)]
    for _ in range(32):
        router.book.begin(router.choose(key_of('the same prompt' * 40), members), 1)
    counts = sorted(router.book.sequences_at(member) for member in members)
    assert sum(counts) == 32
    assert counts[1] <= 21


def test_load_is_what_was_reported_and_what_changed_since() -> None:
    """A report takes in what was sent before it; what is open here is never forgotten."""
    book = LoadBook()
    member = replica('r', running=3)
    book.begin('r', 4)
    assert book.sequences_at(member) == 7
    book.reported('r')
    assert book.sequences_at(member) == 4
    book.end('r', 2)
    assert book.sequences_at(replica('r', running=7)) == 5
    book.end('r', 2)
    assert book.sequences_at(replica('r', running=0)) == 0


def test_loads_are_kept_of_members_alone() -> None:
    """What replicas that have left were sent is forgotten once it has ended there."""
    book = LoadBook()
    for number in range(100):
        book.begin(f'r-{number}', 1)
    book.keep_only({'r-1'})
    assert book.sequences_at(replica('r-5', running=0)) == 1
    for number in range(100):
        book.end(f'r-{number}', 1)
    book.keep_only({'r-1'})
    assert len(book) == 1


@given(st.binary(max_size=2000), st.binary(max_size=600))
def test_keys_of_a_prefix_are_a_prefix_of_the_keys(data: bytes, more: bytes) -> None:
    """Whole blocks keep their keys when a prompt grows, and another adapter's are others."""
    keys, longer = block_keys('m', '', data), block_keys('m', '', data + more)
    whole = len(data) // 256
    assert keys[:whole] == longer[:whole]
    assert set(keys).isdisjoint(block_keys('m', 'x', data))


def test_memory_of_prefixes_is_bounded() -> None:
    """The blocks used longest ago are forgotten."""
    memory = PrefixMemory(capacity=10)
    for block in range(100):
        memory.note([block], 'r')
    assert [block for block in range(100) if memory.find([block], {'r'})] == list(range(90, 100))
