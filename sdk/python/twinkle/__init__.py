"""Twinkle's component library: the building blocks of a training loop.

Importing this package is cheap and does not import torch. The names below are loaded on first use, and each kind of
component has its own package (`twinkle.dataset`, `twinkle.model`, ...).
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twinkle.infra import (
        DeviceGroup,
        DeviceMesh,
        get_device_placement,
        get_logger,
        initialize,
        remote_class,
        remote_function,
    )

__all__ = [
    'DeviceGroup',
    'DeviceMesh',
    'get_device_placement',
    'get_logger',
    'initialize',
    'remote_class',
    'remote_function',
]


def __getattr__(name: str) -> Any:
    """Load a name of `__all__` on first use.

    Raises:
        AttributeError: `name` is not in `__all__`.
    """
    if name not in __all__:
        raise AttributeError(f'module twinkle has no attribute {name!r}')
    value = getattr(importlib.import_module('twinkle.infra'), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
