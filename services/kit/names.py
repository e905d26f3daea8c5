"""The names callers choose for what is kept under a path: adapters, checkpoints, uploads."""

import re

_NAME = re.compile(r'[A-Za-z0-9][A-Za-z0-9._-]{0,127}')
NAME_RULE = '1 to 128 letters, digits, ".", "_" and "-", beginning with a letter or digit'
"""What `is_name` asks for, in words."""


def is_name(text: str) -> bool:
    """Say whether `text` may stand as one part of a path."""
    return _NAME.fullmatch(text) is not None
