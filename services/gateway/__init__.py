"""Gateway service: accounts, sessions, quotas, catalogue, futures, exports, sampling, HTTP APIs, forwarded calls."""

__all__: list[str] = []
