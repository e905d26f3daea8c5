"""Values and rules of training: adapters, operations and their order. This package performs no I/O."""

__all__: list[str] = []
