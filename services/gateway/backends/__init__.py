"""The gateway's machines: SQL stores, the secret hasher, feeds and facts of the services behind it."""

__all__: list[str] = []
