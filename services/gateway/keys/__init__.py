"""Tenants, projects and API keys: who may call, and with which permissions."""

__all__: list[str] = []
