"""Twinkle's component library: what a training loop is composed of.

Importing it is cheap and loads no torch: names here are loaded when first used, and every
component lives in its own package (`twinkle.dataset`, `twinkle.model`, ...).
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
    """Load a name of `__all__` when it is first used."""
    if name not in __all__:
        raise AttributeError(f'module twinkle has no attribute {name!r}')
    value = getattr(importlib.import_module('twinkle.infra'), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
