"""Tinker API on adapters, operations, checkpoints and futures. No other package uses Tinker's vocabulary."""

__all__: list[str] = []
