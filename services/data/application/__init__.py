"""The use cases of the data service: a class for each resource, with a method for each verb."""

__all__: list[str] = []
