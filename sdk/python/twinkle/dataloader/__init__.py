"""Loaders that read datasets in batches and resume exactly. This package does not import torch."""

from twinkle.dataloader.dataloader import DataLoader, LoaderOptions, LoaderState
from twinkle.dataloader.order import count_batches, epoch_order
from twinkle.dataloader.replacing import BadSamples, Replacement

__all__ = ['BadSamples', 'DataLoader', 'LoaderOptions', 'LoaderState', 'Replacement', 'count_batches', 'epoch_order']
