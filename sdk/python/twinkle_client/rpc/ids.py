"""Ids the client chooses, so that sending something twice does it once."""

import uuid


def new_id(prefix: str) -> str:
    """Return an unguessable id that begins with `prefix` and a dash."""
    return f'{prefix}-{uuid.uuid4().hex}'
