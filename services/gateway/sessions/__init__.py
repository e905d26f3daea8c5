"""Sessions of clients: heartbeats, expiry, and the release of resources when a session ends."""

__all__: list[str] = []
