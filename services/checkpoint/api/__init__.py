"""The edge: messages in, verbs awaited, messages out."""

__all__: list[str] = []
