"""Backends of the model service: engine, journals, clients of the checkpoint and data services, and merged models."""

__all__: list[str] = []
