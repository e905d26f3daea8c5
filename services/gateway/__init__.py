"""Gateway service: identity, tenants, sessions, the catalogue, and routing of calls to the other services."""

__all__: list[str] = []
