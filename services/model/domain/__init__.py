"""Values and rules of training: adapters, operations and their order. Standard library and plain data only."""

__all__: list[str] = []
