"""Metrics of runs: numbers by name and step that model services report and programs log."""

__all__: list[str] = []
