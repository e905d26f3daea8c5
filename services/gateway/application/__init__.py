"""The gateway's verbs, one a module. They know values and ports; no storage, no wire."""

__all__: list[str] = []
