"""Values and rules of sampling; standard library and data formats only."""

__all__: list[str] = []
