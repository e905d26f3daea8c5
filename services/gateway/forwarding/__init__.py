"""Forwarding of calls to the other services without parsing their messages."""

__all__: list[str] = []
