"""The verbs of the data service, one a module."""

__all__: list[str] = []
