"""Requests that are accepted durably and answered by id; each is carried out once."""

__all__: list[str] = []
