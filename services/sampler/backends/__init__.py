"""The machines behind the ports: the torch engine and the checkpoint service."""

__all__: list[str] = []
