"""Values and rules of sampling; standard library and data values only."""

__all__: list[str] = []
