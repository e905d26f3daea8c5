"""Implementations of the ports: the component library, and stores on the local disk."""

__all__: list[str] = []
