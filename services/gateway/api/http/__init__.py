"""The gateway over HTTP: one app of routers that share credentials, limits and a graceful end."""

__all__: list[str] = []
