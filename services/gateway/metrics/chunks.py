"""Points of a metric in chunks of consecutive points, as arrays that a database stores as bytes.

A chunk is identified by a step. It has the points from this step on, up to the step of the next chunk. The first chunk
of a metric has the step 0. A chunk that is too long is divided, so sparse steps need no more chunks than dense ones.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from twinkle_services.gateway.metrics.rules import Point

Points = npt.NDArray[Any]
"""Structured array [N] with the fields of `POINT`, by ascending step."""
ChunkKey = tuple[str, int]
"""Name of a metric, and step of a chunk."""
POINT = np.dtype([('step', '<i8'), ('value', '<f8'), ('time_us', '<i8')])
"""Step, value, and time of storage in microseconds since 1970-01-01 UTC."""
CHUNK_POINTS = 1024
"""Maximum number of points of a chunk."""


def chunks_of(points: Iterable[Point], stored: Mapping[str, Sequence[int]], time_us: int) -> dict[ChunkKey, Points]:
    """Return points by the chunk that they belong to. Of points with the same name and step, the last one is kept.

    `stored` contains the steps of the stored chunks of each metric, ascending; a metric without chunks may be absent.
    `time_us` is the time of storage, in microseconds since 1970-01-01 UTC.
    """
    last = {(point.name, point.step): point.value for point in points}
    found = defaultdict[ChunkKey, list[tuple[int, float, int]]](list)
    for (name, step), value in sorted(last.items()):
        chunks = stored.get(name) or [0]
        found[name, chunks[bisect_right(chunks, step) - 1]].append((step, value, time_us))
    return {key: np.array(rows, POINT) for key, rows in found.items()}


def merged(key: ChunkKey, stored: bytes, new: Points) -> dict[ChunkKey, Points]:
    """Return a chunk with `new` points, divided if it is too long; a new point replaces the stored one of its step."""
    before = np.frombuffer(stored, POINT)
    both = np.concatenate([before, new])[::-1]
    # Of equal steps, `unique` returns the first index, which is that of the new point.
    points = both[np.unique(both['step'], return_index=True)[1]]
    if len(points) <= CHUNK_POINTS:
        return {key: points}
    # Points after all stored ones fill the chunk. Otherwise, more points may be inserted, so both parts keep space.
    is_appended = not len(before) or new['step'][0] > before['step'][-1]
    length = CHUNK_POINTS if is_appended else -(-len(points) // (len(points) // CHUNK_POINTS + 1))
    parts = [points[begin : begin + length] for begin in range(0, len(points), length)]
    return {(key[0], int(part['step'][0]) if index else key[1]): part for index, part in enumerate(parts)}


def merge_all(stored: Mapping[ChunkKey, bytes], new: Mapping[ChunkKey, Points]) -> dict[ChunkKey, bytes]:
    """Return the changed chunks; see `merged`."""
    changed: dict[ChunkKey, bytes] = {}
    for key, points in new.items():
        changed.update({own: part.tobytes() for own, part in merged(key, stored.get(key, b''), points).items()})
    return changed


def count_of(chunks: Iterable[bytes]) -> int:
    """Return the number of points in chunks."""
    return sum(map(len, chunks)) // POINT.itemsize


def joined(chunks: Sequence[bytes]) -> Points:
    """Return the points of consecutive chunks."""
    return np.frombuffer(b''.join(chunks), POINT)


def reduced(points: Points, max_points: int) -> Points:
    """Return at most `max_points` points: the first, the last, and the extremes of ranges of steps of equal length.

    NaN is an extreme only of ranges that have no other value.
    """
    if len(points) <= max_points:
        return points
    ranges = (max_points - 2) // 2
    kept = {0, len(points) - 1}
    if ranges:
        first, last = int(points['step'][0]), int(points['step'][-1])
        part = (points['step'] - first) // -(-(last - first + 1) // ranges)
        for indexes in np.split(np.arange(len(points)), np.flatnonzero(np.diff(part)) + 1):
            kept.update(_extremes(points['value'], indexes))
    return points[sorted(kept)]


def _extremes(values: Any, indexes: Any) -> tuple[int, int]:
    """Return the positions of the smallest and the largest value among some positions."""
    numbers = indexes[~np.isnan(values[indexes])]
    if not len(numbers):
        return int(indexes[0]), int(indexes[0])
    return int(numbers[values[numbers].argmin()]), int(numbers[values[numbers].argmax()])
