"""The gRPC interface of the data service."""

__all__: list[str] = []
