"""Use cases of the data service: one class for each resource, with one method for each operation."""

__all__: list[str] = []
