"""Validation of the labels of runs and checkpoints."""

from collections.abc import Mapping


def labels(user_metadata: Mapping[str, str] | None) -> dict[str, str]:
    """Return the labels as a dictionary, which is empty for None.

    Raises:
        TypeError: A name or a value is not a string.
    """
    found = dict(user_metadata or {})
    for name, value in found.items():
        # Programs without type checks may pass other types.
        if not isinstance(name, str) or not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f'user_metadata[{name!r}] has a name or a value that is not a string, got {value!r}')
    return found
