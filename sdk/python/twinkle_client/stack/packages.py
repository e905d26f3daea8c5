"""Check before a start that the libraries of all services are installed."""

from collections.abc import Collection
from importlib.util import find_spec

from twinkle.installation import install_command
from twinkle_client.stack.hosts import StackError

_LIBRARIES = ('fsspec', 'pyarrow', 'pydantic', 'sqlalchemy', 'torch', 'transformers', 'uvicorn')
"""One or more libraries of each extra with a service; an installation of the client alone has none of them."""


def check_packages(libraries: Collection[str] = _LIBRARIES) -> None:
    """Check that the services can be imported.

    Raises:
        StackError: Libraries are missing; the message says what to install.
    """
    missing = [name for name in libraries if find_spec(name) is None]
    if missing:
        raise StackError(f'libraries of the services are missing ({", ".join(missing)}): {install_command("all")}')
