"""Tinker API, implemented with adapters, operations, checkpoints and futures. `catalogue.paths` converts its paths."""

__all__: list[str] = []
