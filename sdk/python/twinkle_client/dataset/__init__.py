"""Datasets of the data service."""

from twinkle_client.dataset.dataset import (
    Dataset,
    IterableDataset,
    IterablePackingDataset,
    LazyDataset,
    PackingDataset,
)
from twinkle_client.dataset.peeking import PeekedRow
from twinkle_client.dataset.source import DatasetMeta

__all__ = [
    'Dataset',
    'DatasetMeta',
    'IterableDataset',
    'IterablePackingDataset',
    'LazyDataset',
    'PackingDataset',
    'PeekedRow',
]
