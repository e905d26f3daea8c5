"""The names callers choose for what is kept under a path: adapters, checkpoints, uploads."""

import re

_NAME = re.compile(r'[A-Za-z0-9][A-Za-z0-9._-]{0,127}')
_ADAPTER_ID = re.compile(r'[A-Za-z0-9][A-Za-z0-9._:-]{0,127}')
NAME_RULE = '1 to 128 letters, digits, ".", "_" and "-", beginning with a letter or digit'
"""What `is_name` asks for, in words."""
ADAPTER_ID_RULE = '1 to 128 letters, digits, ".", "_", ":" and "-", beginning with a letter or digit'
"""What `is_adapter_id` asks for, in words."""


def is_name(text: str) -> bool:
    """Say whether `text` may stand as one part of a path."""
    return _NAME.fullmatch(text) is not None


def is_adapter_id(text: str) -> bool:
    """Say whether `text` may be an adapter's id: a name in which ":" may join the parts of a caller's own scheme."""
    return _ADAPTER_ID.fullmatch(text) is not None
