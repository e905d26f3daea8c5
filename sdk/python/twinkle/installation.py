"""The command that installs missing libraries, for messages of programs."""

import sys

__all__ = ['install_command']

_WITH_TORCH = ('all', 'model', 'sampler')
"""Extras that are tested with fewer versions of Python than the others."""


def install_command(extra: str, version: tuple[int, int] = sys.version_info[:2]) -> str:
    """Return the command that installs an extra, with a note if a version of Python is newer than the tested ones."""
    command = f"pip install 'twinkle-grpc[{extra}]'"
    if extra in _WITH_TORCH and version > (3, 13):
        return f'{command} (tested with Python 3.11 to 3.13; this is {version[0]}.{version[1]})'
    return command
