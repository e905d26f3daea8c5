"""Journals behind `services.model.ports.Journal`: one in memory, one on disk."""

__all__: list[str] = []
