"""The order in which a dataset is read: a pure function of its size, a seed and the epoch."""

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


def count_batches(size: int, *, batch_size: int, min_batch_size: int) -> int:
    """Return the number of batches of an epoch; a last batch below `min_batch_size` is left out."""
    full, rest = divmod(size, batch_size)
    return full + (rest >= min_batch_size and rest > 0)
