"""Check before a start that the libraries of all services are installed."""

import sys
from collections.abc import Collection
from importlib.util import find_spec

from twinkle_client.stack.hosts import StackError

_LIBRARIES = ('fsspec', 'pyarrow', 'pydantic', 'sqlalchemy', 'torch', 'transformers', 'uvicorn')
"""One or more libraries of each extra with a service; an installation of the client alone has none of them."""


def check_packages(libraries: Collection[str] = _LIBRARIES, version: tuple[int, int] = sys.version_info[:2]) -> None:
    """Check that the services can be imported by a version of Python.

    Raises:
        StackError: Libraries are missing; the message says what to install.
    """
    missing = [name for name in libraries if find_spec(name) is None]
    if missing:
        install = "pip install 'twinkle-grpc[all]'"
        if version > (3, 13):
            install += f' (tested with Python 3.11 to 3.13; this is {version[0]}.{version[1]})'
        raise StackError(f'libraries of the services are missing ({", ".join(missing)}): {install}')
