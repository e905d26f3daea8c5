"""Implementations of the ports: stores on disk, in memory and in shared memory, uploads, and base models."""

__all__: list[str] = []
