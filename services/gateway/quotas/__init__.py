"""Quotas of tenants: limits, meters and usage."""

__all__: list[str] = []
