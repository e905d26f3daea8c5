"""Values and rules of sampling. The modules import only the standard library and data formats."""

__all__: list[str] = []
