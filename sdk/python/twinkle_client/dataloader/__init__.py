"""Batches of a dataset, streamed from the data service."""

from twinkle_client.dataloader.dataloader import DataLoader

__all__ = ['DataLoader']
