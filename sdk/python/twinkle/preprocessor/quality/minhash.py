"""MinHash: estimate the similarity of two texts from signatures of fixed size.

The similarity is the resemblance (Jaccard similarity) of the sets of shingles: Broder 1997, "On the resemblance and
containment of documents"; the fraction of equal minima is its estimate (section 3). Candidates are found with bands:
Leskovec, Rajaraman, Ullman, "Mining of Massive Datasets", section 3.4. Signatures are deterministic and equal on every
machine.
"""

from collections import OrderedDict
from typing import Any

import numpy as np
import numpy.typing as npt

Signature = npt.NDArray[np.uint32]

SHINGLE = 8
"""Characters per shingle; characters instead of words, because some languages do not separate words."""
SIZE = 128
"""Minima per signature; the standard error of the estimate is at most 1 / (2 sqrt(128)) = 0.044."""
BANDS = 16
"""Groups of minima. Texts with an equal group are compared. Texts with a similarity of 90 % nearly always have one."""
_SAMPLE = 4096
"""Maximum number of shingles per signature. Shingles with the smallest hashes are used: similar texts share them."""
_BLOCK = 1 << 18
"""Characters hashed at once, to bound the memory for huge texts."""
_MAX_IN_BUCKET = 16
"""Maximum number of rows that are stored for one value of a band."""

_U64 = np.uint64
_BASE = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio, the increment of SplitMix64; also the base of the shingle hash."""
_MASK = (1 << 64) - 1


def signature(text: str) -> Signature:
    """Return the signature of a text, uint32 [SIZE], in time linear in its length."""
    hashes = _smallest(' '.join(text.casefold().split()))
    mixed: npt.NDArray[np.uint64] = hashes[None, :] * _FACTORS[:, None] + _OFFSETS[:, None]
    return (mixed.min(axis=1) >> _U64(32)).astype(np.uint32)


def similarity(one: Signature, other: Signature) -> float:
    """Return the estimated similarity of two texts, 0.0 to 1.0."""
    return int(np.count_nonzero(one == other)) / SIZE


class NearIndex:
    """Finds similar texts among the last `memory` texts; each takes about 5 KB.

    The guard of a text is a digest of the values that must be equal in similar texts.

    Args:
        threshold: minimum similarity, in (0, 1].
        memory: maximum number of texts, at least 1.
    """

    def __init__(self, threshold: float, memory: int) -> None:
        self._threshold, self._memory = threshold, memory
        self._seen: OrderedDict[int, tuple[Signature, bytes]] = OrderedDict()
        self._buckets: dict[tuple[int, bytes], list[int]] = {}

    def find(self, sketch: Signature, guard: bytes) -> tuple[int, float] | None:
        """Return the row and similarity of the most similar candidate with the same guard; None below the threshold."""
        candidates = sorted({row for key in _keys(sketch) for row in self._buckets.get(key, ())})
        scored = [(similarity(sketch, self._seen[row][0]), -row) for row in candidates if self._seen[row][1] == guard]
        best, negative_row = max(scored, default=(0.0, 0))
        return (-negative_row, best) if best >= self._threshold else None

    def add(self, row_index: int, sketch: Signature, guard: bytes) -> None:
        """Add a text; the oldest text is removed if the limit is reached."""
        while len(self._seen) >= self._memory:
            oldest, (oldest_sketch, _) = self._seen.popitem(last=False)
            self._remove(oldest, oldest_sketch)
        self._seen[row_index] = (sketch, guard)
        for key in _keys(sketch):
            bucket = self._buckets.setdefault(key, [])
            if len(bucket) < _MAX_IN_BUCKET:
                bucket.append(row_index)

    def _remove(self, row_index: int, sketch: Signature) -> None:
        for key in _keys(sketch):
            bucket = [row for row in self._buckets.get(key, []) if row != row_index]
            if bucket:
                self._buckets[key] = bucket
            else:
                self._buckets.pop(key, None)


def _keys(sketch: Signature) -> list[tuple[int, bytes]]:
    rows = SIZE // BANDS
    return [(band, sketch[band * rows : (band + 1) * rows].tobytes()) for band in range(BANDS)]


def _smallest(text: str) -> npt.NDArray[np.uint64]:
    """Return the smallest distinct hashes of a text's shingles, uint64, ascending, at least one."""
    padded = text.ljust(SHINGLE, '\0')
    found: npt.NDArray[np.uint64] = np.empty(0, _U64)
    for begin in range(0, len(padded) - SHINGLE + 1, _BLOCK):
        hashes = _shingle_hashes(padded[begin : begin + _BLOCK + SHINGLE - 1])
        found = np.unique(np.concatenate([found, hashes]))[:_SAMPLE]
    return found


def _shingle_hashes(text: str) -> npt.NDArray[np.uint64]:
    """Return the hash of every shingle: its characters as digits of a number, followed by a mixing function."""
    codes = np.frombuffer(text.encode('utf-32-le', 'surrogatepass'), dtype='<u4').astype(_U64)
    count = len(codes) - SHINGLE + 1
    hashes: npt.NDArray[np.uint64] = np.zeros(count, _U64)
    for offset in range(SHINGLE):
        hashes = hashes * _U64(_BASE) + codes[offset : offset + count] + _U64(1)
    return _mixed(hashes)


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return values mixed with the finalizer of SplitMix64 (Steele, Lea, Flood 2014, figure 17)."""
    values = (values ^ (values >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> _U64(27))) * _U64(0x94D049BB133111EB)
    return values ^ (values >> _U64(31))


def _constants(first: int) -> Any:
    steps = [(_BASE * (first + index)) & _MASK for index in range(SIZE)]
    return _mixed(np.array(steps, dtype=_U64))


_FACTORS: npt.NDArray[np.uint64] = _constants(1) | _U64(1)
_OFFSETS: npt.NDArray[np.uint64] = _constants(1 + SIZE)
