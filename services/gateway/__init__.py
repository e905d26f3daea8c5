"""The gateway: identity, tenants, sessions, the catalogue, and the way to every other service."""

__all__: list[str] = []
