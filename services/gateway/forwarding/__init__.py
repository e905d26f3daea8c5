"""Calls that pass through to the other services with their bytes unparsed."""

__all__: list[str] = []
