"""Rules for adapter ids and for names that callers choose, such as those of checkpoints."""

import re

_NAME = re.compile(r'[A-Za-z0-9][A-Za-z0-9._-]{0,127}')
_ADAPTER_ID = re.compile(r'[A-Za-z0-9][A-Za-z0-9._:-]{0,127}')
NAME_RULE = '1 to 128 letters, digits, ".", "_" and "-", beginning with a letter or digit'
"""Description of the names that `is_name` accepts."""
ADAPTER_ID_RULE = '1 to 128 letters, digits, ".", "_", ":" and "-", beginning with a letter or digit'
"""Description of the ids that `is_adapter_id` accepts."""


def is_name(text: str) -> bool:
    """Return whether `text` is a valid name, which can be a part of a path."""
    return _NAME.fullmatch(text) is not None


def is_adapter_id(text: str) -> bool:
    """Return whether `text` is a valid adapter id: a name that may also contain ":"."""
    return _ADAPTER_ID.fullmatch(text) is not None
