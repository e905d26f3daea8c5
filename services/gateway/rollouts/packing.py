"""Groups of rollouts as bytes, compressed with zstd: the summaries as JSON, and the contents one after another.

Lists read the summaries only. Contents are compressed together, because rollouts of a group often have the same prompt.
Both have checksums, and functions raise `DamagedGroup` for damaged bytes.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import zstandard

from twinkle_services.gateway.rollouts.rules import Groups, Rollout, RolloutSummary

GROUP_BYTES = 256
"""Number of bytes that count for a group in addition to its packed bytes, for its row and its indexes."""
_LEVEL = 3
"""Level of compression, the default of zstd."""
_READ_BYTES = 1 << 20
_OTHER_SIZE = 'the content does not have the size that its summaries state'


class DamagedGroup(ValueError):
    """The bytes of a group are not those that were stored."""


@dataclass(frozen=True)
class PackedGroup:
    """A group as it is stored. Equal rollouts have equal bytes."""

    summaries: bytes
    content: bytes
    summary_bytes: int
    """Size of the summaries before compression."""
    content_bytes: int
    """Size of the content before compression."""

    @property
    def size_bytes(self) -> int:
        """Number of bytes that count for the limit of the run."""
        return len(self.summaries) + len(self.content) + GROUP_BYTES


def pack_all(groups: Groups) -> dict[str, PackedGroup]:
    """Return groups in the form in which they are stored."""
    return {group_id: pack(rollouts) for group_id, rollouts in groups.items()}


def merge_all(stored: Mapping[str, PackedGroup], groups: Groups) -> dict[str, PackedGroup]:
    """Return stored groups with new rollouts; a new rollout replaces a stored one with the same index."""
    return {group_id: pack([*unpack(packed), *groups[group_id]]) for group_id, packed in stored.items()}


def pack(rollouts: Sequence[Rollout]) -> PackedGroup:
    """Return a group in the form in which it is stored; of rollouts with the same index, the last one is kept."""
    last = {rollout.summary.index: rollout for rollout in rollouts}
    kept = [last[index] for index in sorted(last)]
    facts = [_facts_of(rollout.summary) for rollout in kept]
    summaries = json.dumps(facts, ensure_ascii=False, separators=(',', ':')).encode()
    content = b''.join(rollout.content for rollout in kept)
    return PackedGroup(_compressed(summaries), _compressed(content), len(summaries), len(content))


def unpack(packed: PackedGroup) -> list[Rollout]:
    """Return the rollouts of a group by ascending index."""
    summaries = unpack_summaries(packed.summaries)
    with _damage_named():
        content = memoryview(zstandard.decompress(packed.content))
    if len(content) != sum(summary.content_bytes for summary in summaries):
        raise DamagedGroup(_OTHER_SIZE)
    rollouts: list[Rollout] = []
    begin = 0
    for summary in summaries:
        end = begin + summary.content_bytes
        rollouts.append(Rollout(summary, bytes(content[begin:end])))
        begin = end
    return rollouts


def unpack_summaries(summaries: bytes) -> list[RolloutSummary]:
    """Return the facts of a group's rollouts by ascending index."""
    with _damage_named():
        return [RolloutSummary(**facts) for facts in json.loads(zstandard.decompress(summaries))]


def content_of(summaries: bytes, content: bytes, index: int) -> bytes | None:
    """Return the content of a rollout, or None if its group has no such rollout."""
    parts: dict[int, tuple[int, int]] = {}
    size = 0
    for summary in unpack_summaries(summaries):
        parts[summary.index] = size, size + summary.content_bytes
        size += summary.content_bytes
    return _part_of(content, *parts[index], size=size) if index in parts else None


def _part_of(content: bytes, begin: int, end: int, *, size: int) -> bytes:
    """Decompress only the bytes from `begin` to `end` into memory; `size` is the size of the complete content."""
    with _damage_named(), zstandard.ZstdDecompressor().stream_reader(content) as reader:
        reader.seek(begin)
        part = reader.read(end - begin)
        # The checksum follows the last byte.
        while reader.read(_READ_BYTES):
            pass
        if reader.tell() != size:
            raise DamagedGroup(_OTHER_SIZE)
    return part


@contextmanager
def _damage_named() -> Iterator[None]:
    """Convert errors about bytes that are not compressed data, and about JSON that does not contain summaries."""
    try:
        yield
    except (zstandard.ZstdError, ValueError, TypeError, MemoryError) as error:
        raise DamagedGroup(str(error)) from error


def _facts_of(summary: RolloutSummary) -> dict[str, Any]:
    """Return the known facts of a rollout. Python reads and writes infinite numbers and NaN as an extension of JSON."""
    return {name: value for name, value in asdict(summary).items() if value not in (None, '', {})}


def _compressed(data: bytes) -> bytes:
    # A compressor must not be used by several threads.
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(data)
