"""Parts of the gateway, put together: recipes that `__main__` is made of. Only these two know concrete classes."""

__all__: list[str] = []
