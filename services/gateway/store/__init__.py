"""Database engine, tables and migrations that every feature of the gateway stores its rows in."""

__all__: list[str] = []
