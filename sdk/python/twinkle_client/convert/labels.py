"""Labels of runs and checkpoints."""

from collections.abc import Mapping


def labels(user_metadata: Mapping[str, str] | None) -> dict[str, str]:
    """Return labels as they travel: none where there is no mapping.

    Raises:
        TypeError: a name or a value is no string; nothing is turned into one silently.
    """
    found = dict(user_metadata or {})
    for name, value in found.items():
        # What a program without types gives.
        if not isinstance(name, str) or not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f'user_metadata[{name!r}] must be a string with a string as its name, got {value!r}')
    return found
