"""Metrics of runs: numbers by name and step that programs log."""

__all__: list[str] = []
