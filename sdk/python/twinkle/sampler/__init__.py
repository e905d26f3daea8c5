"""Samplers: the torch reference engine (`engine/`) and its user-facing face."""

__all__: list[str] = []
