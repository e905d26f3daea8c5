"""Database engine, base class of tables, and schema migrations. Features define their own tables and stores."""

__all__: list[str] = []
