"""The machines of the model service: the engine that trains, the client of the checkpoint service."""

__all__: list[str] = []
