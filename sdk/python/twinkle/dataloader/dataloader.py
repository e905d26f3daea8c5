"""Batches of a dataset in a reproducible order, which a resumed run continues exactly."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypedDict, Unpack, cast

from twinkle.dataloader.ranks import rank_slice
from twinkle.dataloader.replacing import Replacement, ReplacementLog
from twinkle.dataloader.sources import BatchSource, IndexedBatches, Layout, Position, Rows, StreamedBatches
from twinkle.infra import DeviceMesh, program_mesh, remote_class, runtime


class LoaderOptions(TypedDict, total=False):
    """Options of a loader."""

    min_batch_size: int
    """Minimum size of the last batch; a smaller batch is dropped. Default: the number of data ranks, or `batch_size`
    with `drop_last`."""
    rank: int | None
    """Rank of this process in the mesh. No effect in mode 'ray'. Default: the environment variable `RANK`."""
    shuffle: bool
    """Whether each epoch has a different random order. Default: False."""
    shuffle_buffer: int
    """Number of rows in the shuffle buffer of a stream, at least 1. Default: 1000."""
    seed: int
    """Seed of the random orders. Default: 42."""
    drop_last: bool
    """Whether an incomplete last batch is left out. No effect if `min_batch_size` is given. Default: False."""
    max_retries: int
    """Maximum number of rows tried instead of a row that cannot be read. Default: 20."""
    num_workers: int
    """No effect, because rows are read in this process; a value above 0 causes a warning. Default: 0."""


class LoaderState(TypedDict):
    """The position of a loader, and the options that determine its order."""

    consumed_train_samples: int
    """Number of examples before the position, over all epochs and ranks."""
    epoch: int
    """Zero-based epoch."""
    epoch_samples: int
    """Number of examples of this epoch before the position, over all ranks."""
    seed: int | None
    """Seed of the random orders; None without shuffling."""
    batch_size: int
    """Number of examples per batch, over all ranks."""
    dataset_size: int | None
    """Number of rows; None for a stream."""
    epoch_size: int | None
    """Number of examples per epoch; None for a stream."""
    shuffle_buffer: int | None
    """Number of rows in the shuffle buffer; None unless the dataset is a shuffled stream."""


@remote_class(execute='first')
class DataLoader:
    """Reads a dataset in batches, which are lists of rows.

    Each `for` loop is one epoch. The position is a number of examples, and the order is a pure function of seed, epoch
    and size. Therefore a resumed run reads exactly the batches of an uninterrupted run, on any number of ranks. A row
    that cannot be read is replaced by a different row; the replacement is logged and added to `replacements`. The loop
    raises `BadSamples` if none of `max_retries` other rows can be read either.

    In mode 'ray', every loader yields whole batches, which a trainer divides among its workers. With `remote_group`,
    the first worker of the group reads the dataset; a function that returns the dataset is called there.

    Concurrency: not safe to share between threads.
    """

    def __init__(
        self,
        dataset: 'Rows | Iterable[Any] | Callable[[], Any]',
        *,
        batch_size: int,
        device_mesh: DeviceMesh | None = None,
        **options: Unpack[LoaderOptions],
    ) -> None:
        """Open a dataset.

        Args:
            dataset: an object with indices and a length, an object that can be iterated over repeatedly, or a function
                that returns either kind of object.
            batch_size: number of examples per batch over all data ranks; a multiple of the number of data ranks.
            device_mesh: mesh whose data ranks share each batch; each rank reads its part. None: the mesh of
                `initialize`, or all processes that torchrun started.
            options: see `LoaderOptions`.

        Raises:
            ValueError: a number is out of range, or this process has no rank in the mesh.
            TypeError: an option is unknown, or the dataset can be read only once.
        """
        _check_options(options)
        self._layout = _layout(batch_size, device_mesh, options)
        self.batch_size = batch_size
        self.min_batch_size = self._layout.min_batch_size
        self.seed: int | None = self._layout.seed
        """Seed of the random orders; None without shuffling."""
        self.dataset: Any = dataset() if callable(dataset) else dataset
        """The dataset that is read."""
        self._log = ReplacementLog(options.get('max_retries', 20))
        self._source = _source(self.dataset, self._layout, self._log)
        self._processor: Callable[[list[Any]], Any] | None = None
        self._position = Position()
        self._is_resuming = False

    @property
    def replacements(self) -> Sequence[Replacement]:
        """Rows that could not be read and the rows used instead, in the order of reading."""
        return tuple(self._log.entries)

    def set_processor(self, processor: Callable[[list[Any]], Any]) -> None:
        """Set a function that is applied to each batch before the loader yields it."""
        self._processor = processor

    def skip_consumed_samples(self, consumed_train_samples: int) -> None:
        """Start the next loop after this many examples.

        A stream is read up to this position when the loop starts.

        Args:
            consumed_train_samples: number of examples over all epochs and ranks, at least 0.

        Raises:
            ValueError: the number is negative, or is not the beginning of a batch (for a stream, raised when the loop
                starts).
        """
        if consumed_train_samples < 0:
            raise ValueError(f'consumed_train_samples must be at least 0, got {consumed_train_samples}')
        self._position = self._source.located(consumed_train_samples)
        self._is_resuming = True

    def resume_from_checkpoint(self, consumed_train_samples: 'int | Mapping[str, Any]') -> None:
        """Start the next loop at the position where an earlier run stopped.

        Args:
            consumed_train_samples: the number of examples, or the result of an earlier `get_state`. The full state
                avoids reading earlier epochs of a stream again.

        Raises:
            ValueError: the state belongs to a different dataset, batch size or order, or is not the beginning of a
                batch. For a number of examples of a stream, the error is raised when the loop starts.
        """
        if not isinstance(consumed_train_samples, Mapping):
            self.skip_consumed_samples(consumed_train_samples)
            return
        state, now = consumed_train_samples, self.get_state()
        for name in ('seed', 'batch_size', 'dataset_size', 'epoch_size', 'shuffle_buffer'):
            if state.get(name, now[name]) != now[name]:
                raise ValueError(
                    f'the state has {name} {state[name]}, but this loader has {name} {now[name]}; create the loader as '
                    'in the earlier run'
                )
        self.skip_consumed_samples(int(state['consumed_train_samples']))
        if self._source.size is None and 'epoch' in state:
            self._position = Position(self._position.consumed, int(state['epoch']), int(state['epoch_samples']))

    def get_state(self) -> LoaderState:
        """Return the position after the last batch that was yielded, as JSON values."""
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
            raise TypeError('the loader has no length, because its dataset is a stream')
        return self._source.batch_count

    def __iter__(self) -> Iterator[Any]:
        if self._position.within and not self._is_resuming:
            # An earlier loop has read this epoch, completely or partially; a new loop starts the next epoch.
            self._position = self._source.next_epoch(self._position)
        self._is_resuming = False
        for batch, position in self._source.batches(self._position):
            self._position = position
            yield batch if self._processor is None else self._processor(batch)


def _check_options(options: Mapping[str, Any]) -> None:
    unknown = sorted(set(options) - set(LoaderOptions.__annotations__))
    if unknown:
        raise TypeError(f'unknown loader options {unknown}; known are {sorted(LoaderOptions.__annotations__)}')
    for name, minimum in {'max_retries': 0, 'shuffle_buffer': 1}.items():
        if options.get(name, minimum) < minimum:
            raise ValueError(f'{name} must be at least {minimum}, got {options[name]}')
    if options.get('num_workers'):
        warnings.warn('num_workers has no effect: rows are read in this process', stacklevel=3)


def _layout(batch_size: int, device_mesh: DeviceMesh | None, options: LoaderOptions) -> Layout:
    if batch_size < 1:
        raise ValueError(f'batch_size must be at least 1, got {batch_size}')
    settings = runtime()
    mesh = device_mesh or settings.device_mesh or program_mesh(None)
    rank_count = 1 if mesh is None else mesh.data_world_size
    if batch_size % rank_count:
        raise ValueError(f'batch_size must be a multiple of the {rank_count} data ranks, got {batch_size}')
    min_batch_size = options.get('min_batch_size', batch_size if options.get('drop_last') else rank_count)
    if not rank_count <= min_batch_size <= batch_size:
        raise ValueError(f'min_batch_size must be from {rank_count} to batch_size {batch_size}, got {min_batch_size}')
    return Layout(
        batch_size=batch_size,
        min_batch_size=min_batch_size,
        part=rank_slice(None if settings.mode == 'ray' else mesh, rank=options.get('rank')),
        seed=options.get('seed', 42) if options.get('shuffle') else None,
        shuffle_buffer=options.get('shuffle_buffer', 1000),
    )


def _source(dataset: Any, layout: Layout, log: ReplacementLog) -> BatchSource:
    if hasattr(dataset, '__getitem__') and hasattr(dataset, '__len__'):
        return IndexedBatches(cast('Rows', dataset), layout, log)
    if not isinstance(dataset, Iterable):
        raise TypeError(f'a dataset must support indices or iteration, got {type(dataset).__name__}')
    if isinstance(dataset, Iterator):
        raise TypeError(
            'the dataset is an iterator, which can be read only once; give an object that can be re-iterated'
        )
    return StreamedBatches(cast('Iterable[Any]', dataset), layout, log)
