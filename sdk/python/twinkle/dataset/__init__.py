"""Datasets: load, map, encode and pack training rows. Importing it loads neither torch nor pandas."""

from twinkle.dataset.base import BaseDataset
from twinkle.dataset.bin_packing import pack_best_fit
from twinkle.dataset.dataset import Dataset
from twinkle.dataset.errors import DatasetError, InvalidExample, NotReady, UnreadableFile
from twinkle.dataset.files import FORMATS, write_rows
from twinkle.dataset.iterable import IterableDataset
from twinkle.dataset.iterable_packing import IterablePackingDataset
from twinkle.dataset.lazy import LazyDataset
from twinkle.dataset.loading import read_rows
from twinkle.dataset.meta import DatasetMeta
from twinkle.dataset.packing import PackingDataset, join_features
from twinkle.dataset.row_bounds import RowBounds, counted, size_in_memory
from twinkle.dataset.sources import find_files, load_rows, open_source, stream_rows
from twinkle.dataset.streams import ROW_ERRORS, RefusedRow
from twinkle.dataset.window_packing import WindowPacker

__all__ = [
    'FORMATS',
    'ROW_ERRORS',
    'BaseDataset',
    'Dataset',
    'DatasetError',
    'DatasetMeta',
    'InvalidExample',
    'IterableDataset',
    'IterablePackingDataset',
    'LazyDataset',
    'NotReady',
    'PackingDataset',
    'RefusedRow',
    'RowBounds',
    'UnreadableFile',
    'WindowPacker',
    'counted',
    'find_files',
    'join_features',
    'load_rows',
    'open_source',
    'pack_best_fit',
    'read_rows',
    'size_in_memory',
    'stream_rows',
    'write_rows',
]
