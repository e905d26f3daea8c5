"""Batches of a dataset, in an order that can be taken up again exactly."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypedDict, Unpack, cast

from twinkle.dataloader.ranks import rank_slice
from twinkle.dataloader.replacing import Replacement, ReplacementLog
from twinkle.dataloader.sources import BatchSource, IndexedBatches, Layout, Position, Rows, StreamedBatches
from twinkle.infra import DeviceMesh, place_here, refuse_many_ranks, runtime


class LoaderOptions(TypedDict, total=False):
    """How a loader reads its dataset."""

    min_batch_size: int
    """A last batch of fewer examples is left out. Unset: one for each data rank, or `batch_size` with `drop_last`."""
    device_mesh: DeviceMesh | None
    """Mesh whose data ranks share each batch, each reading its part. Unset: that of `initialize`."""
    rank: int | None
    """This process's rank in the mesh. Unset: the environment's `RANK`."""
    remote_group: str | None
    """Group of ranks that the batches are for: one that is this process, which reads them."""
    shuffle: bool
    """Read in another random order each epoch. Unset: False."""
    shuffle_buffer: int
    """Rows of a stream that are held to shuffle it. Unset: 1000."""
    seed: int
    """Of the random orders. Unset: 42."""
    drop_last: bool
    """Leave out a last batch that is not full. Unset: False."""
    max_retries: int
    """Most rows tried in the place of one that cannot be read. Unset: 20."""
    num_workers: int
    """Rows are read in this process, so workers would have nothing to do; above 0 only warns."""


class LoaderState(TypedDict):
    """A position, and what it is a position in."""

    consumed_train_samples: int
    """Examples before the position, counted over all epochs and ranks."""
    epoch: int
    """Zero-based."""
    epoch_samples: int
    """Examples of this epoch before the position."""
    seed: int | None
    """None: not shuffled."""
    batch_size: int
    dataset_size: int | None
    """Rows. None: a stream, which does not know."""
    epoch_size: int | None
    """Examples that an epoch gives out. None: a stream, which does not know."""
    shuffle_buffer: int | None
    """Rows held to shuffle. None: not a shuffled stream."""


class DataLoader:
    """Reads a dataset in batches: lists of rows.

    Each `for` loop is one epoch. The position is an example count, and the order is a pure
    function of seed and epoch, so a run that is resumed sees exactly what it would have seen, on any number
    of ranks. A row that cannot be read is replaced by another one, which is logged and kept in `replacements`.
    """

    def __init__(
        self, dataset: 'Rows | Iterable[Any] | Callable[[], Any]', *, batch_size: int, **options: Unpack[LoaderOptions]
    ) -> None:
        """Open a dataset.

        Args:
            dataset: what has indices or can be iterated over again and again, or a function that makes it.
            batch_size: examples a batch, over all data ranks; a multiple of their number.

        Raises:
            ValueError: a number is out of range, this process is no rank of the mesh, or the group is unknown.
            NotSupportedYet: the group is more than this process, or the mesh is that of a group of several ranks.
            TypeError: an option is unknown, or the dataset can be read once only.
        """
        _check_options(options)
        self._layout = _layout(batch_size, options)
        self.batch_size = batch_size
        self.min_batch_size = self._layout.min_batch_size
        self.seed: int | None = self._layout.seed
        """Of the random orders; None: not shuffled."""
        self.dataset: Any = dataset() if callable(dataset) else dataset
        """What is read."""
        self._log = ReplacementLog(options.get('max_retries', 20))
        self._source = _source(self.dataset, self._layout, self._log)
        self._processor: Callable[[list[Any]], Any] | None = None
        self._position = Position()
        self._is_resuming = False

    @property
    def replacements(self) -> Sequence[Replacement]:
        """Rows that could not be read and what took their place, in the order of reading."""
        return tuple(self._log.entries)

    def set_processor(self, processor: Callable[[list[Any]], Any]) -> None:
        """Apply `processor` to each batch before it is given out."""
        self._processor = processor

    def skip_consumed_samples(self, consumed_train_samples: int) -> None:
        """Begin the next loop behind this many examples, counted over all epochs.

        A stream is read up to there when the loop begins.

        Raises:
            ValueError: it is negative, or not where a batch of this loader begins (a stream says so in the loop).
        """
        if consumed_train_samples < 0:
            raise ValueError(f'consumed_train_samples must be at least 0, got {consumed_train_samples}')
        self._position = self._source.located(consumed_train_samples)
        self._is_resuming = True

    def resume_from_checkpoint(self, consumed_train_samples: 'int | Mapping[str, Any]') -> None:
        """Go on where a run stopped.

        Args:
            consumed_train_samples: the count, or the whole of an earlier `get_state`, which in a
                stream saves reading the epochs before its own.

        Raises:
            ValueError: the state is of another dataset, batch size or order.
        """
        if not isinstance(consumed_train_samples, Mapping):
            self.skip_consumed_samples(consumed_train_samples)
            return
        state, now = consumed_train_samples, self.get_state()
        for name in ('seed', 'batch_size', 'dataset_size', 'epoch_size', 'shuffle_buffer'):
            if state.get(name, now[name]) != now[name]:
                raise ValueError(f'the state is of a loader with {name} {state[name]}, this one has {now[name]}')
        self.skip_consumed_samples(int(state['consumed_train_samples']))
        if self._source.size is None and 'epoch' in state:
            self._position = Position(self._position.consumed, int(state['epoch']), int(state['epoch_samples']))

    def get_state(self) -> LoaderState:
        """Return the position behind the last batch given out; JSON-ready."""
        layout, source = self._layout, self._source
        is_shuffled_stream = source.size is None and layout.seed is not None
        return LoaderState(
            consumed_train_samples=self._position.consumed,
            epoch=self._position.epoch,
            epoch_samples=self._position.within,
            seed=layout.seed,
            batch_size=layout.batch_size,
            dataset_size=source.size,
            epoch_size=source.epoch_size,
            shuffle_buffer=layout.shuffle_buffer if is_shuffled_stream else None,
        )

    def __len__(self) -> int:
        """Return the number of batches of one epoch.

        Raises:
            TypeError: the dataset is a stream.
        """
        if not isinstance(self._source, IndexedBatches):
            raise TypeError('a loader of a stream has no length')
        return self._source.batch_count

    def __iter__(self) -> Iterator[Any]:
        if self._position.within and not self._is_resuming:
            # A loop that was left early is not taken up.
            self._position = self._source.next_epoch(self._position)
        self._is_resuming = False
        for batch, position in self._source.batches(self._position):
            self._position = position
            yield batch if self._processor is None else self._processor(batch)


def _check_options(options: Mapping[str, Any]) -> None:
    unknown = sorted(set(options) - set(LoaderOptions.__annotations__))
    if unknown:
        raise TypeError(f'unknown loader options {unknown}; known are {sorted(LoaderOptions.__annotations__)}')
    for name, least in {'max_retries': 0, 'shuffle_buffer': 1}.items():
        if options.get(name, least) < least:
            raise ValueError(f'{name} must be at least {least}, got {options[name]}')
    if options.get('num_workers'):
        warnings.warn('num_workers has no effect: rows are read in this process', stacklevel=3)
    if place_here('DataLoader', options.get('remote_group')) is not None:
        refuse_many_ranks(options.get('device_mesh'))


def _layout(batch_size: int, options: LoaderOptions) -> Layout:
    if batch_size < 1:
        raise ValueError(f'batch_size must be at least 1, got {batch_size}')
    mesh = options.get('device_mesh') or runtime().device_mesh
    rank_count = 1 if mesh is None else mesh.data_world_size
    if batch_size % rank_count:
        raise ValueError(f'batch_size must be a multiple of the {rank_count} data ranks, got {batch_size}')
    min_batch_size = options.get('min_batch_size', batch_size if options.get('drop_last') else rank_count)
    if not rank_count <= min_batch_size <= batch_size:
        raise ValueError(f'min_batch_size must be from {rank_count} to batch_size {batch_size}, got {min_batch_size}')
    return Layout(
        batch_size=batch_size,
        min_batch_size=min_batch_size,
        part=rank_slice(mesh, rank=options.get('rank')),
        seed=options.get('seed', 42) if options.get('shuffle') else None,
        shuffle_buffer=options.get('shuffle_buffer', 1000),
    )


def _source(dataset: Any, layout: Layout, log: ReplacementLog) -> BatchSource:
    if hasattr(dataset, '__getitem__') and hasattr(dataset, '__len__'):
        return IndexedBatches(cast('Rows', dataset), layout, log)
    if not isinstance(dataset, Iterable):
        raise TypeError(f'a dataset must have indices or be iterable, got {type(dataset).__name__}')
    if isinstance(dataset, Iterator):
        raise TypeError('this dataset can be read once only; give an object whose every iteration begins anew')
    return StreamedBatches(cast('Iterable[Any]', dataset), layout, log)
