"""Backends of `twinkle.tracking`, one module each. Packages of trackers are imported when a backend is created."""

__all__: list[str] = []
