"""Points of a metric in chunks of consecutive steps, as arrays that a database stores as bytes."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from services.gateway.metrics.rules import Point

Points = npt.NDArray[Any]
"""Structured array [N] with the fields of `POINT`, by ascending step."""
ChunkKey = tuple[str, int]
"""Name of a metric, and index of a chunk."""
POINT = np.dtype([('step', '<i8'), ('value', '<f8'), ('time_us', '<i8')])
"""Step, value, and time of storage in microseconds since 1970-01-01 UTC."""
CHUNK_STEPS = 1024
"""Number of steps of a chunk."""


def chunks_of(points: Iterable[Point], time_us: int) -> dict[ChunkKey, Points]:
    """Return points by chunk. Of several points with one name and step, the last one is kept."""
    last = {(point.name, point.step): point.value for point in points}
    found = defaultdict[ChunkKey, list[tuple[int, float, int]]](list)
    for (name, step), value in sorted(last.items()):
        found[name, step // CHUNK_STEPS].append((step, value, time_us))
    return {key: np.array(rows, POINT) for key, rows in found.items()}


def merged(stored: bytes, new: Points) -> Points:
    """Return the points of a chunk after `new` points were added; they replace stored ones with the same step."""
    both = np.concatenate([np.frombuffer(stored, POINT), new])[::-1]
    # Of equal steps, `unique` returns the first index, which is that of the new point.
    return both[np.unique(both['step'], return_index=True)[1]]


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


def joined(chunks: Sequence[bytes]) -> Points:
    """Return the points of consecutive chunks."""
    return np.frombuffer(b''.join(chunks), POINT)


def merge_all(stored: Mapping[ChunkKey, bytes], new: Mapping[ChunkKey, Points]) -> dict[ChunkKey, Points]:
    """Return the changed chunks; see `merged`."""
    return {key: merged(stored.get(key, b''), points) for key, points in new.items()}


def _extremes(values: Any, indexes: Any) -> tuple[int, int]:
    """Return the positions of the smallest and the largest value among some positions."""
    numbers = indexes[~np.isnan(values[indexes])]
    if not len(numbers):
        return int(indexes[0]), int(indexes[0])
    return int(numbers[values[numbers].argmin()]), int(numbers[values[numbers].argmax()])
