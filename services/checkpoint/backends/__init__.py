"""The machines behind the ports: a store in folders, one in memory, uploads in files."""

__all__: list[str] = []
