"""Tinker API on adapters, operations, checkpoints and futures. Outside of it, only `catalogue.paths` uses its terms."""

__all__: list[str] = []
