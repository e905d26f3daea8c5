"""A streamed dataset whose examples are joined into packs."""

from collections.abc import Iterable

from twinkle.dataset.errors import NotReady
from twinkle.dataset.hints import ExecutionOptions
from twinkle.dataset.iterable import IterableDataset
from twinkle.dataset.meta import DatasetMeta
from twinkle.dataset.row_bounds import Row
from twinkle.dataset.streams import Stream, repeated
from twinkle.dataset.window_packing import packed
from twinkle.infra import get_logger, remote_class
from twinkle.preprocessor import FormatReader
from twinkle.template import Template


@remote_class()
class IterablePackingDataset(IterableDataset):
    """A streamed dataset whose rows, after `pack_dataset`, are packs in the form of `PackingDataset`."""

    def __init__(
        self,
        dataset_meta: DatasetMeta | None = None,
        *,
        packing_interval: int = 128,
        packing_num_proc: int = 1,
        cyclic: bool = False,
        template: Template | None = None,
    ) -> None:
        """Open the dataset.

        Args:
            dataset_meta: source of the first rows. Default: none; rows are then added with `add_dataset`.
            packing_interval: number of new examples per round of packing, at least 1. More examples waste fewer tokens
                and need more memory. Default: 128.
            packing_num_proc: at least 1. Packing always uses one process; larger values only log a warning. Default: 1.
            cyclic: whether the packs of `pack_dataset` repeat the rows without end. Default: False.
            template: the same as `set_template` with an instance. Default: none.

        Raises:
            HubError: the dataset cannot be found or downloaded.
            DatasetError: a file, subset or split cannot be read.
            ValueError: `packing_interval` or `packing_num_proc` is less than 1.
        """
        super().__init__(dataset_meta, template=template)
        if packing_interval < 1:
            raise ValueError(f'packing_interval must be at least 1, got {packing_interval}')
        if packing_num_proc < 1:
            raise ValueError(f'packing_num_proc must be at least 1, got {packing_num_proc}')
        if packing_num_proc > 1:
            get_logger().warning(
                'packing_num_proc=%d has no effect: a stream is packed in this process', packing_num_proc
            )
        self._packing_interval = packing_interval
        self._is_cyclic = cyclic
        self._is_prompt = False
        self.is_packed = False
        """Whether the rows are packs."""

    def pack_dataset(self) -> None:
        """Join encoded examples into packs of at most the template's `max_length` tokens while they are read.

        Examples are not cut. Unless the dataset is cyclic, an iteration puts every example into exactly one pack. An
        example that cannot be packed causes an `InvalidExample` when it is read; see `PackingDataset.pack_dataset`.

        Raises:
            NotReady: the rows are not encoded, are prompts without labels, are already packed or are being recorded.
        """
        if not self.is_encoded:
            raise NotReady('the rows are not encoded; call encode() before pack_dataset()', needs='encode')
        if self.is_packed:
            raise NotReady('the rows are already packed; call pack_dataset() only once')
        if self._is_prompt:
            raise NotReady('the rows have no labels (add_generation_prompt=True); only training examples can be packed')
        capacity = self._template().max_length
        self._replace(None, lambda rows: self._packed(rows, capacity))
        self.is_packed = True

    def _packed(self, rows: Stream, capacity: int) -> Stream:
        source = repeated(rows) if self._is_cyclic else rows
        return packed(source, capacity=capacity, interval=self._packing_interval)

    def _encoded(
        self, rows: Stream, template: Template, report: list[str], reader: FormatReader, options: ExecutionOptions
    ) -> Stream:
        self._is_prompt = reader.is_prompt
        return super()._encoded(rows, template, report, reader, options)

    def _rows_to_save(self) -> Iterable[Row]:
        if self._is_cyclic and self.is_packed:
            raise NotReady("a cyclic dataset is endless and cannot be saved; use mode='training' and flush_save()")
        return super()._rows_to_save()
