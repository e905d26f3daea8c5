"""Sessions of clients: heartbeats, expiry, and the settlement of ended sessions."""

__all__: list[str] = []
