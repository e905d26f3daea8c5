"""Comparison of installed library versions with the range that a patch supports."""

import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

VersionRange = tuple[str, str]
"""First supported version, and first later version that is not supported."""


def version_problem(libraries: Mapping[str, VersionRange]) -> str | None:
    """Return a message about the first library whose version is not supported, or None."""
    for library, (first, end) in libraries.items():
        try:
            installed = version(library)
        except PackageNotFoundError:
            return f'supports {library} from {first} to before {end}, but {library} is not installed'
        if not release_numbers(first) <= release_numbers(installed) < release_numbers(end):
            return f'supports {library} from {first} to before {end}, but {installed} is installed'
    return None


def release_numbers(text: str) -> tuple[int, ...]:
    """Return the release numbers of a version as a comparable tuple; suffixes are ignored.

    Raises:
        ValueError: the text does not start with a number.
    """
    found = re.match(r'\d+(\.\d+)*', text)
    if found is None:
        raise ValueError(f'{text!r} is not a version')
    return tuple(int(part) for part in found[0].split('.'))
