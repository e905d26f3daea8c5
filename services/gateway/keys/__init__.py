"""Tenants, projects and API keys, and the authentication of calls."""

__all__: list[str] = []
