"""The order in which a dataset is read: a pure function of its size, a seed and the epoch."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

_SEED_MASK = (1 << 64) - 1


def epoch_order(size: int, *, seed: int | None, epoch: int) -> npt.NDArray[np.int64]:
    """Return int64 [size]: the indices in the order of one epoch.

    The same arguments give the same order on every machine and in every version: it is a stable
    sort by words of numpy's PCG64, whose stream numpy promises to keep (that of its shuffles it does not).

    Args:
        seed: None: ascending.
        epoch: zero-based; each epoch has another order.
    """
    if seed is None:
        return np.arange(size)
    words = np.random.PCG64(np.random.SeedSequence([seed & _SEED_MASK, epoch])).random_raw(size)
    return np.argsort(words, kind='stable')


def replacement_index(size: int, *, seed: int, place: tuple[int, int], attempt: int) -> int:
    """Return the index of the row that is tried in the place of a bad one: a pure function, as `epoch_order`.

    Args:
        place: epoch, and place in its order.
        attempt: from 1.
    """
    return _words([seed & _SEED_MASK, *place, attempt])() % size


def shuffled_stream(rows: Iterator[Any], *, seed: int, epoch: int, buffer_size: int) -> Iterator[Any]:
    """Yield rows in a random order, each at most as far ahead as `buffer_size` rows are held.

    The same arguments and rows give the same order on every machine, as `epoch_order`.
    """
    draw = _words([seed & _SEED_MASK, epoch])
    held = list(islice(rows, buffer_size))
    for row in rows:
        slot = draw() % len(held)
        yield held[slot]
        held[slot] = row
    while held:
        slot = draw() % len(held)
        held[slot], held[-1] = held[-1], held[slot]
        yield held.pop()


def _words(entropy: list[int]) -> Callable[[], int]:
    return np.random.PCG64(np.random.SeedSequence(entropy)).random_raw


def count_batches(size: int, *, batch_size: int, min_batch_size: int) -> int:
    """Return the number of batches of an epoch; a last batch below `min_batch_size` is left out."""
    full, rest = divmod(size, batch_size)
    return full + (rest >= min_batch_size and rest > 0)
