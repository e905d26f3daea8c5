"""Use cases of the data service, one class for each resource. They authorize callers and order changes."""

__all__: list[str] = []
