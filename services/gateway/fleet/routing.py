"""Who gets a request: where its adapter is, then where its prefix is, and nobody more than a fair share.

Affinity is consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2018), over rendezvous
scores: when a replica joins or leaves, only keys that it wins or held move. What was sent where lately is
remembered by block of the prefix, so that the turns of a chat meet the cache that the turns before it filled.
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from services.gateway.fleet.rules import Replica, ReplicaState

BLOCK_BYTES = 256
"""64 tokens of four bytes."""
MAX_BLOCKS = 128
"""A prefix longer than that is told apart by its first 8,192 tokens."""
LOAD_FACTOR = 1.25
"""Most a replica gets for affinity's sake, as a multiple of its fair share."""
RESIDENT_FLOOR = 4
"""Sequences below which a replica that has the adapter is never too busy for one more."""
UNTOLD_CAPACITY = 256
"""Sequences at once of a replica that does not tell."""
MAX_REMEMBERED_BLOCKS = 1 << 16

_MASK = (1 << 64) - 1
_SCHEME = 'twinkle://'


@dataclass(frozen=True, kw_only=True)
class AdapterWish:
    """The weights that a request asks for."""

    adapter_id: str
    """A checkpoint's path where a checkpoint is asked for."""
    exact: int | None = None
    at_least: int | None = None
    is_checkpoint: bool = False
    """What a path names may be replaced at any time, so nobody goes on with what another sampler drew from it."""

    def is_met_by(self, version: int) -> bool:
        """Whether a version would do."""
        if self.exact is not None:
            return version == self.exact
        return version >= (self.at_least or 0)


@dataclass(frozen=True, kw_only=True)
class RouteKey:
    """What decides where a request goes."""

    base_model: str
    """Empty: any."""
    adapter: AdapterWish | None = None
    blocks: tuple[int, ...] = ()
    """Of `block_keys`."""
    weight: int = 1
    """Sequences it will run."""

    @property
    def run_id(self) -> str:
        """The run whose weights are asked for; empty: none's."""
        if self.adapter is None:
            return ''
        name = self.adapter.adapter_id
        return name.removeprefix(_SCHEME).partition('/')[0] if self.adapter.is_checkpoint else name


def block_keys(base_model: str, adapter_id: str, data: bytes) -> tuple[int, ...]:
    """Return a key for each whole block of a prompt's bytes, each depending on all blocks before it.

    A prompt shorter than a block has one key, of all it has.
    """
    chain = hashlib.blake2b(f'{base_model}\0{adapter_id}\0'.encode(), digest_size=8)
    whole = min(len(data) // BLOCK_BYTES, MAX_BLOCKS) * BLOCK_BYTES or len(data)
    keys: list[int] = []
    for begin in range(0, max(whole, 1), BLOCK_BYTES):
        chain.update(data[begin : begin + BLOCK_BYTES])
        keys.append(int.from_bytes(chain.digest(), 'little'))
    return tuple(keys)


class PrefixMemory:
    """Remembers which replica each block of a prefix was sent to last."""

    def __init__(self, capacity: int = MAX_REMEMBERED_BLOCKS) -> None:
        """Keep at most `capacity` blocks, the ones used last."""
        self._capacity = capacity
        self._homes: OrderedDict[int, str] = OrderedDict()

    def find(self, blocks: Sequence[int], among: Collection[str]) -> str | None:
        """Return the replica, one of `among`, that was sent most of this prefix."""
        homes = (self._homes.get(block, '') for block in reversed(blocks))
        return next((home for home in homes if home in among), None)

    def note(self, blocks: Sequence[int], replica_id: str) -> None:
        """Remember that a prefix was sent to a replica."""
        for block in blocks:
            self._homes[block] = replica_id
            self._homes.move_to_end(block)
        while len(self._homes) > self._capacity:
            self._homes.popitem(last=False)


class LoadBook:
    """How many sequences each replica has: what it reported, and what was sent to it or ended since."""

    def __init__(self) -> None:
        """Begin with none."""
        self._open: Counter[str] = Counter()
        self._since_report: Counter[str] = Counter()

    def begin(self, replica_id: str, weight: int) -> None:
        """Count sequences sent to a replica."""
        self._open[replica_id] += weight
        self._since_report[replica_id] += weight

    def end(self, replica_id: str, weight: int) -> None:
        """Count sequences that ended there."""
        self._open[replica_id] -= weight
        self._since_report[replica_id] -= weight
        if not self._open[replica_id]:
            del self._open[replica_id]

    def reported(self, replica_id: str) -> None:
        """Take it that the replica's load is as of now."""
        self._since_report.pop(replica_id, None)

    def keep_only(self, replica_ids: Collection[str]) -> None:
        """Forget what was counted since their last reports of all but these."""
        for replica_id in self._since_report.keys() - set(replica_ids):
            del self._since_report[replica_id]

    def __len__(self) -> int:
        """How many replicas something is kept of."""
        return len(self._open.keys() | self._since_report.keys())

    def sequences_at(self, replica: Replica) -> int:
        """Return how many sequences a replica has, as far as is known."""
        load = replica.report.load
        reported = load.running_sequence_count + load.waiting_sequence_count if load else 0
        replica_id = replica.replica_id
        return max(self._open[replica_id], reported + self._since_report[replica_id])


def choose(
    key: RouteKey,
    usable: Sequence[Replica],
    *,
    book: LoadBook,
    memory: PrefixMemory,
    versions_at: Callable[[str, str], Iterable[int]],
) -> Replica | None:
    """Return the replica that a request goes to, and remember it; None where none is usable.

    One that is full is chosen only where all are; otherwise the first of these that has no more than its fair
    share: the one with the adapter that was sent this prefix, one with the adapter, the one that was sent this
    prefix, any. Among equals the prefix's first block decides.
    """
    if not usable:
        return None
    counts = {replica.replica_id: book.sequences_at(replica) for replica in usable}
    pool = [item for item in usable if counts[item.replica_id] < _capacity(item)] or usable
    holders = _holders(key.adapter, pool, versions_at)
    share = LOAD_FACTOR * (sum(counts.values()) + key.weight) / sum(map(_capacity, usable))
    fair = [
        item
        for item in pool
        if counts[item.replica_id]
        < max(ceil(share * _capacity(item)), RESIDENT_FLOOR if item.replica_id in holders else 0)
    ]
    home = memory.find(key.blocks, {item.replica_id for item in fair})
    ranks = [
        (item.replica_id not in holders, item.replica_id != home, -_score(key, item.replica_id), item) for item in fair
    ]
    if ranks:
        chosen = min(ranks, key=lambda rank: rank[:3])[3]
    else:
        chosen = min(pool, key=lambda item: (counts[item.replica_id] / _capacity(item), -_score(key, item.replica_id)))
    memory.note(key.blocks, chosen.replica_id)
    return chosen


def candidates(key: RouteKey, replicas: Iterable[Replica]) -> list[Replica]:
    """Return those that may hold the base model and are not draining."""
    return [
        item
        for item in replicas
        if item.state is not ReplicaState.DRAINING and (not key.base_model or is_holder(item, key.base_model))
    ]


def is_holder(replica: Replica, base_model: str) -> bool:
    """Whether a replica holds a base model, or does not tell which it holds."""
    return not replica.report.base_models or base_model in replica.report.base_models


def _holders(
    wish: AdapterWish | None, pool: Iterable[Replica], versions_at: Callable[[str, str], Iterable[int]]
) -> set[str]:
    """Return the ids of those that hold what is wished for; where any version would do, of the newest."""
    if wish is None:
        return set()
    newest: dict[str, int] = {}
    for replica in pool:
        good = [version for version in versions_at(replica.replica_id, wish.adapter_id) if wish.is_met_by(version)]
        if good:
            newest[replica.replica_id] = max(good)
    return {replica_id for replica_id, version in newest.items() if version == max(newest.values())}


def _capacity(replica: Replica) -> int:
    load = replica.report.load
    return load.max_sequence_count if load and load.max_sequence_count > 0 else UNTOLD_CAPACITY


def _score(key: RouteKey, replica_id: str) -> int:
    """Return a number that is as good as random, and always the same for the prefix and the replica."""
    first = key.blocks[0] if key.blocks else 0
    seed = _seed_of(replica_id)
    # The finaliser of splitmix64 (Steele, Lea and Flood, 2014).
    mixed = (first ^ seed) & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return mixed ^ mixed >> 31


@lru_cache(maxsize=1024)
def _seed_of(replica_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(replica_id.encode(), digest_size=8).digest(), 'little')
