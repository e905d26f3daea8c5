"""Backends of the model service: the engine, the journals, and clients of the checkpoint and data services."""

__all__: list[str] = []
