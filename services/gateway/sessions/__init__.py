"""Sessions of clients: heartbeats, expiry, and what is settled when one ends."""

__all__: list[str] = []
