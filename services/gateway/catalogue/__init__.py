"""Runs and checkpoints as tenants see them, followed from the model and checkpoint services."""

__all__: list[str] = []
