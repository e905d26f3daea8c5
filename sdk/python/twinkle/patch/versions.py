"""Which versions of other libraries a patch is for."""

import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

VersionRange = tuple[str, str]
"""The first version that fits, and the first one after it that does not."""


def misfit(libraries: Mapping[str, VersionRange]) -> str | None:
    """Return what is wrong with the installed libraries, in a sentence; None where all of them fit."""
    for library, (first, end) in libraries.items():
        try:
            installed = version(library)
        except PackageNotFoundError:
            return f'is for {library} from {first} to before {end}, which is not installed'
        if not numbers(first) <= numbers(installed) < numbers(end):
            return f'is for {library} from {first} to before {end}, and {installed} is installed'
    return None


def numbers(text: str) -> tuple[int, ...]:
    """Return the release numbers of a version, so that versions compare; what comes after them is left out."""
    found = re.match(r'\d+(\.\d+)*', text)
    if found is None:
        raise ValueError(f'{text!r} is no version')
    return tuple(int(part) for part in found[0].split('.'))
