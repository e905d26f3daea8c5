"""Values and rules of the gateway: keys, sessions, the catalogue. Standard library only; no storage, no wire."""

__all__: list[str] = []
