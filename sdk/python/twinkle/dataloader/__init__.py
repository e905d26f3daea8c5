"""Datasets read batch by batch. Loads no torch."""

from twinkle.dataloader.dataloader import DataLoader, LoaderOptions, LoaderState
from twinkle.dataloader.order import count_batches, epoch_order

__all__ = ['DataLoader', 'LoaderOptions', 'LoaderState', 'count_batches', 'epoch_order']
