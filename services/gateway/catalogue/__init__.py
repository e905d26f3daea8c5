"""Catalogue of runs and checkpoints: a copy of entries that the model and checkpoint services own."""

__all__: list[str] = []
