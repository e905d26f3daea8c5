"""Traces: the spans that the services of a stack write to a folder."""

__all__: list[str] = []
