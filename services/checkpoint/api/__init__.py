"""The gRPC interface: servicers, and conversion between messages and domain values with all input checks."""

__all__: list[str] = []
