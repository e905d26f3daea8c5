"""The Tinker API on adapters, operations, checkpoints and futures. Its vocabulary stops in this folder."""

__all__: list[str] = []
