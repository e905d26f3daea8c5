"""Chooses the replica for a request: by resident adapter, then by cached prefix, among replicas with a fair load.

Affinity is consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2018) over rendezvous scores:
when a replica joins or leaves, only the keys that it gains or loses change their replica. Recent requests are
remembered by prefix block, so that each turn of a chat reaches the replica whose cache holds the earlier turns.
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from twinkle_services.gateway.fleet.rules import Replica, ReplicaState

BLOCK_BYTES = 256
"""Size of a prefix block: 64 tokens of four bytes."""
MAX_BLOCKS = 128
"""Maximum number of blocks that count for affinity: the first 8,192 tokens of a prefix."""
LOAD_FACTOR = 1.25
"""Maximum load that affinity may give a replica, as a multiple of its fair share."""
RESIDENT_FLOOR = 4
"""A replica that holds the adapter and is not full may run this many sequences, even beyond its fair share."""
DEFAULT_CAPACITY = 256
"""Assumed number of concurrent sequences of a replica that reports no maximum."""
MAX_REMEMBERED_BLOCKS = 1 << 16

_MASK = (1 << 64) - 1
_SCHEME = 'twinkle://'


@dataclass(frozen=True, kw_only=True)
class AdapterRequest:
    """Adapter weights that a sampling request needs: an exact version, a minimum version, or any version."""

    adapter_id: str
    """Adapter id, or the path of a checkpoint."""
    exact: int | None = None
    at_least: int | None = None
    is_checkpoint: bool = False
    """Whether `adapter_id` is a path. Its checkpoint may be replaced, so no other sampler may continue a stream."""

    def is_satisfied_by(self, version: int) -> bool:
        """Return whether a version satisfies the request."""
        if self.exact is not None:
            return version == self.exact
        return version >= (self.at_least or 0)


@dataclass(frozen=True, kw_only=True)
class RouteKey:
    """Properties of a request that decide its replica."""

    base_model: str
    """Empty if any base model is acceptable."""
    adapter: AdapterRequest | None = None
    blocks: tuple[int, ...] = ()
    """Result of `block_keys`."""
    weight: int = 1
    """Number of sequences that the request runs."""

    @property
    def run_id(self) -> str:
        """Run whose weights are requested; empty for the base model."""
        if self.adapter is None:
            return ''
        name = self.adapter.adapter_id
        return name.removeprefix(_SCHEME).partition('/')[0] if self.adapter.is_checkpoint else name


def block_keys(base_model: str, adapter_id: str, data: bytes) -> tuple[int, ...]:
    """Return a key for each full block of a prompt's bytes, for at most `MAX_BLOCKS` blocks.

    Each key depends on the base model, the adapter, the block and all earlier blocks. A prompt that is shorter than a
    block has one key.
    """
    chain = hashlib.blake2b(f'{base_model}\0{adapter_id}\0'.encode(), digest_size=8)
    hashed_bytes = min(len(data) // BLOCK_BYTES, MAX_BLOCKS) * BLOCK_BYTES or len(data)
    keys: list[int] = []
    for begin in range(0, max(hashed_bytes, 1), BLOCK_BYTES):
        chain.update(data[begin : begin + BLOCK_BYTES])
        keys.append(int.from_bytes(chain.digest(), 'little'))
    return tuple(keys)


class PrefixMemory:
    """Remembers the replica that each prefix block was last sent to, for the `capacity` most recent blocks."""

    def __init__(self, capacity: int = MAX_REMEMBERED_BLOCKS) -> None:
        self._capacity = capacity
        self._replica_by_block: OrderedDict[int, str] = OrderedDict()

    def find(self, blocks: Sequence[int], among: Collection[str]) -> str | None:
        """Return the replica in `among` that received the longest part of this prefix, or None."""
        found = (self._replica_by_block.get(block, '') for block in reversed(blocks))
        return next((replica_id for replica_id in found if replica_id in among), None)

    def note(self, blocks: Sequence[int], replica_id: str) -> None:
        """Record that a prefix was sent to a replica."""
        for block in blocks:
            self._replica_by_block[block] = replica_id
            self._replica_by_block.move_to_end(block)
        while len(self._replica_by_block) > self._capacity:
            self._replica_by_block.popitem(last=False)


class LoadTable:
    """Counts each replica's open sequences from this gateway, and the change of this count since its last report."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()
        self._since_report: Counter[str] = Counter()

    def begin(self, replica_id: str, weight: int) -> None:
        """Count sequences sent to a replica."""
        self._open[replica_id] += weight
        self._since_report[replica_id] += weight

    def end(self, replica_id: str, weight: int) -> None:
        """Subtract sequences that finished on a replica."""
        self._open[replica_id] -= weight
        self._since_report[replica_id] -= weight
        if not self._open[replica_id]:
            del self._open[replica_id]

    def reported(self, replica_id: str) -> None:
        """Reset the counts since the last report, because a new report has arrived."""
        self._since_report.pop(replica_id, None)

    def keep_only(self, replica_ids: Collection[str]) -> None:
        """Reset the counts since the last report for all replicas not in `replica_ids`; open sequences stay counted."""
        for replica_id in self._since_report.keys() - set(replica_ids):
            del self._since_report[replica_id]

    def __len__(self) -> int:
        return len(self._open.keys() | self._since_report.keys())

    def sequences_at(self, replica: Replica) -> int:
        """Return the reported number of sequences plus the changes since, but at least the number of open ones."""
        load = replica.report.load
        reported = load.running_sequence_count + load.waiting_sequence_count if load else 0
        replica_id = replica.replica_id
        return max(self._open[replica_id], reported + self._since_report[replica_id])


def choose(
    key: RouteKey,
    usable: Sequence[Replica],
    *,
    loads: LoadTable,
    memory: PrefixMemory,
    versions_at: Callable[[str, str], Iterable[int]],
) -> Replica | None:
    """Return the replica for a request and remember the choice; None if no replica is usable.

    A full replica is chosen only if all are full. Replicas below their fair share are preferred in this order: the
    holder of the adapter that received this prefix, other holders, the replica that received this prefix, all others.
    If no replica is below its share, the least loaded one is chosen. A hash of the first block breaks ties.
    """
    if not usable:
        return None
    counts = {replica.replica_id: loads.sequences_at(replica) for replica in usable}
    pool = [item for item in usable if counts[item.replica_id] < _capacity(item)] or usable
    holders = _holders(key.adapter, pool, versions_at)
    share = LOAD_FACTOR * (sum(counts.values()) + key.weight) / sum(map(_capacity, usable))
    fair = [
        item
        for item in pool
        if counts[item.replica_id]
        < max(ceil(share * _capacity(item)), RESIDENT_FLOOR if item.replica_id in holders else 0)
    ]
    previous = memory.find(key.blocks, {item.replica_id for item in fair})
    ranks = [
        (item.replica_id not in holders, item.replica_id != previous, -_score(key, item.replica_id), item)
        for item in fair
    ]
    if ranks:
        chosen = min(ranks, key=lambda rank: rank[:3])[3]
    else:
        chosen = min(pool, key=lambda item: (counts[item.replica_id] / _capacity(item), -_score(key, item.replica_id)))
    memory.note(key.blocks, chosen.replica_id)
    return chosen


def candidates(key: RouteKey, replicas: Iterable[Replica]) -> list[Replica]:
    """Return the replicas that may hold the base model and are not draining."""
    return [
        item
        for item in replicas
        if item.state is not ReplicaState.DRAINING and (not key.base_model or is_holder(item, key.base_model))
    ]


def is_holder(replica: Replica, base_model: str) -> bool:
    """Return whether a replica holds a base model, or does not report its base models."""
    return not replica.report.base_models or base_model in replica.report.base_models


def _holders(
    adapter: AdapterRequest | None, pool: Iterable[Replica], versions_at: Callable[[str, str], Iterable[int]]
) -> set[str]:
    """Return the ids of the replicas that hold the newest version satisfying the request."""
    if adapter is None:
        return set()
    newest: dict[str, int] = {}
    for replica in pool:
        versions = versions_at(replica.replica_id, adapter.adapter_id)
        usable = [version for version in versions if adapter.is_satisfied_by(version)]
        if usable:
            newest[replica.replica_id] = max(usable)
    return {replica_id for replica_id, version in newest.items() if version == max(newest.values())}


def _capacity(replica: Replica) -> int:
    load = replica.report.load
    return load.max_sequence_count if load and load.max_sequence_count > 0 else DEFAULT_CAPACITY


def _score(key: RouteKey, replica_id: str) -> int:
    """Return a pseudorandom number that depends only on the first block of the prefix and on the replica."""
    first = key.blocks[0] if key.blocks else 0
    # The finalizer of splitmix64 (Steele, Lea and Flood, 2014).
    mixed = (first ^ _seed_of(replica_id)) & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return mixed ^ mixed >> 31


@lru_cache(maxsize=1024)
def _seed_of(replica_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(replica_id.encode(), digest_size=8).digest(), 'little')
