"""Groups of rollouts as bytes, compressed with zstd: the summaries as JSON, and the contents one after another.

Lists read the summaries only. Contents are compressed together, because completions of a group often have one prompt.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import zstandard

from services.gateway.rollouts.rules import Groups, Rollout, RolloutSummary

GROUP_BYTES = 256
"""Number of bytes that count for a group in addition to its packed bytes, for its row and its indexes."""
_LEVEL = 3
"""Level of compression, the default of zstd."""


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
    """Return stored groups after new rollouts were added; they replace those with the same index."""
    return {group_id: pack([*unpack(packed), *groups[group_id]]) for group_id, packed in stored.items()}


def pack(rollouts: Sequence[Rollout]) -> PackedGroup:
    """Return a group in the form in which it is stored; of several rollouts with one index, the last one counts."""
    last = {rollout.summary.index: rollout for rollout in rollouts}
    kept = [last[index] for index in sorted(last)]
    facts = [_facts_of(rollout.summary) for rollout in kept]
    summaries = json.dumps(facts, ensure_ascii=False, separators=(',', ':')).encode()
    content = b''.join(rollout.content for rollout in kept)
    return PackedGroup(_compressed(summaries), _compressed(content), len(summaries), len(content))


def unpack(packed: PackedGroup) -> list[Rollout]:
    """Return the rollouts of a group by ascending index."""
    content = memoryview(zstandard.decompress(packed.content))
    rollouts: list[Rollout] = []
    begin = 0
    for summary in unpack_summaries(packed.summaries):
        end = begin + summary.content_bytes
        rollouts.append(Rollout(summary, bytes(content[begin:end])))
        begin = end
    return rollouts


def unpack_summaries(summaries: bytes) -> list[RolloutSummary]:
    """Return the facts of a group's rollouts by ascending index."""
    return [RolloutSummary(**facts) for facts in json.loads(zstandard.decompress(summaries))]


def content_of(summaries: bytes, content: bytes, index: int) -> bytes | None:
    """Return the content of a rollout, or None if its group has no such rollout."""
    begin = 0
    for summary in unpack_summaries(summaries):
        if summary.index == index:
            with zstandard.ZstdDecompressor().stream_reader(content) as reader:
                reader.seek(begin)
                return reader.read(summary.content_bytes)
        begin += summary.content_bytes
    return None


def _facts_of(summary: RolloutSummary) -> dict[str, Any]:
    """Return the known facts of a rollout. Numbers that are not finite are extensions of JSON, which Python reads."""
    return {name: value for name, value in asdict(summary).items() if value not in (None, '', {})}


def _compressed(data: bytes) -> bytes:
    # A compressor must not be used by several threads.
    return zstandard.ZstdCompressor(level=_LEVEL).compress(data)
