"""Batches of a dataset, in an order that can be taken up again exactly."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypedDict, Unpack

from twinkle.dataloader.order import count_batches, epoch_order
from twinkle.infra import DeviceMesh, refuse_many_ranks


class Rows(Protocol):
    """What can be read by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class LoaderOptions(TypedDict, total=False):
    """How a loader reads its dataset."""

    min_batch_size: int
    """A last batch of fewer examples is left out. Unset: 1, or `batch_size` with `drop_last`."""
    device_mesh: DeviceMesh | None
    """Mesh whose data ranks share each batch; one rank for now."""
    shuffle: bool
    """Read in another random order each epoch. Unset: False."""
    seed: int
    """Of the random orders. Unset: 42."""
    drop_last: bool
    """Leave out a last batch that is not full. Unset: False."""
    num_workers: int
    """Rows are encoded already, so workers would have nothing to do; above 0 only warns."""


class LoaderState(TypedDict):
    """A position, and what it is a position in."""

    consumed_train_samples: int
    """Examples before the position, counted over all epochs."""
    seed: int | None
    """None: not shuffled."""
    batch_size: int
    dataset_size: int


class DataLoader:
    """Reads a dataset in batches: lists of rows.

    Each `for` loop is one epoch. The position is an example count, and the order is a pure
    function of seed and epoch, so a run that is resumed sees exactly what it would have seen.
    """

    def __init__(
        self, dataset: 'Rows | Callable[[], Rows]', *, batch_size: int, **options: Unpack[LoaderOptions]
    ) -> None:
        """Open a dataset.

        Args:
            dataset: a dataset, or a function that makes it.
            batch_size: examples a batch, over all data ranks.

        Raises:
            ValueError: a number is out of range.
            TypeError: an option is unknown.
            NotSupportedYet: the mesh has more than one rank.
        """
        unknown = sorted(set(options) - set(LoaderOptions.__annotations__))
        if unknown:
            raise TypeError(f'unknown loader options {unknown}; known are {sorted(LoaderOptions.__annotations__)}')
        refuse_many_ranks(options.get('device_mesh'))
        if batch_size < 1:
            raise ValueError(f'batch_size must be at least 1, got {batch_size}')
        self.batch_size = batch_size
        self.min_batch_size = options.get('min_batch_size', batch_size if options.get('drop_last') else 1)
        if not 1 <= self.min_batch_size <= batch_size:
            raise ValueError(f'min_batch_size must be from 1 to batch_size {batch_size}, got {self.min_batch_size}')
        if options.get('num_workers'):
            warnings.warn('num_workers has no effect: rows are encoded before they are loaded', stacklevel=2)
        self.seed: int | None = options.get('seed', 42) if options.get('shuffle') else None
        """Of the random orders; None: not shuffled."""
        self.dataset: Rows = dataset() if callable(dataset) else dataset
        """What is read."""
        self._processor: Callable[[list[Any]], Any] | None = None
        self._consumed = 0
        self._is_resuming = False

    def set_processor(self, processor: Callable[[list[Any]], Any]) -> None:
        """Apply `processor` to each batch before it is given out."""
        self._processor = processor

    def skip_consumed_samples(self, consumed_train_samples: int) -> None:
        """Begin the next loop behind this many examples, counted over all epochs.

        Raises:
            ValueError: it is negative, or not where a batch of this loader begins.
        """
        if consumed_train_samples < 0:
            raise ValueError(f'consumed_train_samples must be at least 0, got {consumed_train_samples}')
        within = consumed_train_samples % self._epoch_rows() if self._epoch_rows() else 0
        if within % self.batch_size:
            raise ValueError(
                f'no batch begins at consumed_train_samples {consumed_train_samples}: '
                f'batches of {self.batch_size} begin anew with each epoch of {self._epoch_rows()} examples'
            )
        self._consumed = consumed_train_samples
        self._is_resuming = True

    def resume_from_checkpoint(self, consumed_train_samples: 'int | Mapping[str, Any]') -> None:
        """Go on where a run stopped.

        Args:
            consumed_train_samples: the count, or the whole of an earlier `get_state`.

        Raises:
            ValueError: the state is of another dataset, batch size or order.
        """
        if isinstance(consumed_train_samples, Mapping):
            now = self.get_state()
            for name in ('seed', 'batch_size', 'dataset_size'):
                if consumed_train_samples.get(name, now[name]) != now[name]:
                    then = consumed_train_samples[name]
                    raise ValueError(f'the state is of a loader with {name} {then}, this one has {now[name]}')
            consumed_train_samples = int(consumed_train_samples['consumed_train_samples'])
        self.skip_consumed_samples(consumed_train_samples)

    def get_state(self) -> LoaderState:
        """Return the position behind the last batch given out; JSON-ready."""
        return LoaderState(
            consumed_train_samples=self._consumed,
            seed=self.seed,
            batch_size=self.batch_size,
            dataset_size=len(self.dataset),
        )

    def __len__(self) -> int:
        """Return the number of batches of one epoch."""
        return count_batches(len(self.dataset), batch_size=self.batch_size, min_batch_size=self.min_batch_size)

    def __iter__(self) -> Iterator[Any]:
        epoch, begin = self._start()
        order = epoch_order(len(self.dataset), seed=self.seed, epoch=epoch)
        for offset in range(begin, self._epoch_rows(), self.batch_size):
            indices = order[offset : min(offset + self.batch_size, self._epoch_rows())]
            batch = [self.dataset[int(index)] for index in indices]
            self._consumed = epoch * self._epoch_rows() + offset + len(indices)
            yield batch if self._processor is None else self._processor(batch)

    def _start(self) -> tuple[int, int]:
        """Return the epoch and the row in it where a loop begins; a loop that was left early is not taken up."""
        if not self._epoch_rows():
            return 0, 0
        epoch, within = divmod(self._consumed, self._epoch_rows())
        if within and not self._is_resuming:
            epoch, within = epoch + 1, 0
            self._consumed = epoch * self._epoch_rows()
        self._is_resuming = False
        return epoch, within

    def _epoch_rows(self) -> int:
        """Return the examples of one epoch, those of a last batch that is left out not counted."""
        return min(len(self) * self.batch_size, len(self.dataset))
