"""The verbs of the model service, one a module, over ports. No protos, no torch."""

__all__: list[str] = []
