"""Trainers: the engine, and the classes a training loop is written with. The engine is `twinkle.model.engine`."""

__all__: list[str] = []
