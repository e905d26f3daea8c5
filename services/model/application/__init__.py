"""Verbs of the model service over its ports, one module per resource. Imports no protos and no torch."""

__all__: list[str] = []
