"""Exports of checkpoints to hubs and folders, in the background."""

__all__: list[str] = []
