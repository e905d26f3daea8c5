"""The contract's edge: servicers, and conversion between messages and domain values with every input check."""

__all__: list[str] = []
