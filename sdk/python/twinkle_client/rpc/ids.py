"""Ids chosen by the client, which make resent requests idempotent."""

import uuid


def new_id(prefix: str) -> str:
    """Return a random id that begins with `prefix` and a dash."""
    return f'{prefix}-{uuid.uuid4().hex}'
