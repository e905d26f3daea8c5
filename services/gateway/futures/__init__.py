"""Futures: requests that are stored durably and run exactly once, and whose results are fetched by id."""

__all__: list[str] = []
