"""Import of the optional packages of backends."""

import importlib
from typing import Any

from twinkle.component import MissingLibrary


def required(library: str, *, module: str = '') -> Any:
    """Return the module of a library.

    Args:
        library: Name of the library; the extra `tracking-<library>` of this distribution installs it.
        module: Module to return. Default: the library's main module.

    Raises:
        MissingLibrary: The library is not installed.
    """
    extra = f'twinkle-grpc[tracking-{library}]'
    try:
        package = importlib.import_module(library)
    except ModuleNotFoundError as error:
        if error.name != library:
            raise
        raise MissingLibrary(library, extra) from error
    # A folder with output of the tracker, such as ./wandb, can be imported as a package without code.
    if getattr(package, '__file__', None) is None:
        raise MissingLibrary(library, extra)
    return importlib.import_module(module) if module else package
