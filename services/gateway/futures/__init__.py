"""Futures: requests that are stored durably and take effect once, and whose results are fetched by id."""

__all__: list[str] = []
