"""The machines of the data service: the component library, and the disk."""

__all__: list[str] = []
