"""Exports: checkpoints copied to a hub or a folder in the background."""

__all__: list[str] = []
