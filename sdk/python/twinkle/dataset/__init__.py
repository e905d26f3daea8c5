"""Rows to train on: loaded, mapped, encoded, packed. Loads neither torch nor pandas."""

from twinkle.dataset.bin_packing import pack_best_fit
from twinkle.dataset.dataset import Dataset
from twinkle.dataset.errors import DatasetError, InvalidExample, NotReady, UnreadableFile
from twinkle.dataset.files import FORMATS, read_rows, write_rows
from twinkle.dataset.meta import DatasetMeta
from twinkle.dataset.packing import PackingDataset, join_features
from twinkle.dataset.sources import load_rows

__all__ = [
    'FORMATS',
    'Dataset',
    'DatasetError',
    'DatasetMeta',
    'InvalidExample',
    'NotReady',
    'PackingDataset',
    'UnreadableFile',
    'join_features',
    'load_rows',
    'pack_best_fit',
    'read_rows',
    'write_rows',
]
