"""The order in which a dataset is read, as a pure function of its size, the seed and the epoch."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

_SEED_MASK = (1 << 64) - 1
"""Maps seeds, including negative seeds, to unsigned 64-bit integers, which numpy requires."""


def epoch_order(size: int, *, seed: int | None, epoch: int) -> npt.NDArray[np.int64]:
    """Return the row indices of one epoch in order, int64 [size].

    The same arguments give the same order on every machine and in every version. Rows are sorted by numbers of numpy's
    PCG64 generator, because numpy guarantees that these numbers never change, unlike the results of its shuffles.

    Args:
        size: number of rows.
        seed: seed of the order; None gives ascending indices.
        epoch: zero-based epoch; each epoch has a different order.
    """
    if seed is None:
        return np.arange(size)
    words = np.random.PCG64(np.random.SeedSequence([seed & _SEED_MASK, epoch])).random_raw(size)
    return np.argsort(words, kind='stable')


def replacement_index(size: int, *, seed: int, epoch_position: tuple[int, int], attempt: int) -> int:
    """Return the index of a row that is tried instead of an unreadable row; deterministic like `epoch_order`.

    Args:
        size: number of rows.
        seed: seed of the choice.
        epoch_position: the epoch, and the position of the unreadable row in the order of this epoch.
        attempt: number of the attempt, starting with 1.
    """
    return _words([seed & _SEED_MASK, *epoch_position, attempt])() % size


def shuffled_stream(rows: Iterator[Any], *, seed: int, epoch: int, buffer_size: int) -> Iterator[Any]:
    """Yield rows in a random order, using a shuffle buffer.

    The same arguments and rows give the same order on every machine.

    Args:
        rows: the rows in their original order.
        seed: seed of the order.
        epoch: zero-based epoch; each epoch has a different order.
        buffer_size: number of rows in the buffer, at least 1. A row moves by less than this number of positions towards
            the beginning.
    """
    next_word = _words([seed & _SEED_MASK, epoch])
    buffer = list(islice(rows, buffer_size))
    for row in rows:
        slot = next_word() % len(buffer)
        yield buffer[slot]
        buffer[slot] = row
    while buffer:
        slot = next_word() % len(buffer)
        buffer[slot], buffer[-1] = buffer[-1], buffer[slot]
        yield buffer.pop()


def _words(entropy: list[int]) -> Callable[[], int]:
    return np.random.PCG64(np.random.SeedSequence(entropy)).random_raw


def count_batches(size: int, *, batch_size: int, min_batch_size: int) -> int:
    """Return the number of batches per epoch of `size` rows; a last batch below `min_batch_size` is left out."""
    full, rest = divmod(size, batch_size)
    return full + (rest >= min_batch_size and rest > 0)
