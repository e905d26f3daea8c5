"""Implementations of `twinkle_services.model.ports.Journal`: one in memory and one on disk."""

__all__: list[str] = []
