"""The contract's side of the data service."""

__all__: list[str] = []
