"""Use cases of the checkpoint service, one class for each resource. They authorize callers and order changes."""

__all__: list[str] = []
