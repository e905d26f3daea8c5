"""The contract's edge: messages in and out, every input check, nothing else."""

__all__: list[str] = []
