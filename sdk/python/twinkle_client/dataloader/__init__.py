"""Batches of a dataset, streamed from the data service or passed to the model service by handle."""

from twinkle_client.dataloader.dataloader import DataLoader
from twinkle_client.dataloader.handle import BatchHandle

__all__ = ['BatchHandle', 'DataLoader']
