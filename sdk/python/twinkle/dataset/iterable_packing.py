"""Packs of a stream."""

from collections.abc import Iterable

from twinkle.dataset.errors import NotReady
from twinkle.dataset.files import Row
from twinkle.dataset.hints import tell_of_processes
from twinkle.dataset.iterable import IterableDataset
from twinkle.dataset.meta import DatasetMeta
from twinkle.dataset.streams import Stream, repeated
from twinkle.dataset.window_packing import packed
from twinkle.infra import remote_class
from twinkle.template import Template


@remote_class()
class IterablePackingDataset(IterableDataset):
    """A stream whose rows, after `pack_dataset`, are packs as those of `PackingDataset`."""

    def __init__(
        self,
        dataset_meta: DatasetMeta | None = None,
        *,
        packing_interval: int = 128,
        packing_num_proc: int = 1,
        cyclic: bool = False,
        template: Template | None = None,
    ) -> None:
        """Open the rows.

        Args:
            packing_interval: examples that are packed together, at least 1. More waste less and hold more.
            packing_num_proc: at least 1. Packing is one quick pass, so more are told to have no effect.
            cyclic: whether packs go on with the first row when the rows end, without end.
        """
        super().__init__(dataset_meta, template=template)
        tell_of_processes('packing_num_proc', packing_num_proc)
        if packing_interval < 1:
            raise ValueError(f'packing_interval must be at least 1, got {packing_interval}')
        self._packing_interval = packing_interval
        self._is_cyclic = cyclic
        self._is_prompt = False
        self.is_packed = False
        """Whether rows are packs."""

    def pack_dataset(self) -> None:
        """Join encoded examples, as they pass, into packs of at most the template's `max_length` tokens.

        No example is cut, and in each pass every example is in exactly one pack.

        Raises:
            NotReady: the rows are not encoded, are prompts without labels, or are packed already.
        """
        if not self.is_encoded:
            raise NotReady('the rows are not encoded; call encode() before pack_dataset()', needs='encode')
        if self.is_packed:
            raise NotReady('the rows are packed already')
        if self._is_prompt:
            raise NotReady('these rows have no labels (add_generation_prompt=True); only training examples are packed')
        capacity = self._template().max_length
        self._replace(None, lambda rows: self._packed(rows, capacity))
        self.is_packed = True

    def _packed(self, rows: Stream, capacity: int) -> Stream:
        source = repeated(rows) if self._is_cyclic else rows
        return packed(source, capacity=capacity, interval=self._packing_interval)

    def _encoded(self, rows: Stream, template: Template, report: list[str], *, is_prompt: bool) -> Stream:
        self._is_prompt = is_prompt
        return super()._encoded(rows, template, report, is_prompt=is_prompt)

    def _rows_to_save(self) -> Iterable[Row]:
        if self._is_cyclic and self.is_packed:
            raise NotReady("a cyclic dataset has no end to save; use mode='training' and flush_save()")
        return super()._rows_to_save()
