"""The verbs, one a module. They authorise, order and commit; bytes and wire are elsewhere."""

__all__: list[str] = []
