"""Sessions of clients: heartbeats, expiry, and the settlement of expired and finished sessions."""

__all__: list[str] = []
