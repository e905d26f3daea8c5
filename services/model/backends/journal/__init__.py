"""Journals that implement `services.model.ports.Journal`: in memory and on disk."""

__all__: list[str] = []
