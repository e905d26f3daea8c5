"""Registries that build components (losses, metrics, processors, ...) by name, and their errors."""

from twinkle.component.error_capture import ErrorCapture
from twinkle.component.missing import MissingLibrary
from twinkle.component.registry import (
    ComponentRegistry,
    InvalidComponent,
    InvalidComponentOptions,
    UnknownComponent,
    check_options,
    near_misses,
)

__all__ = [
    'ComponentRegistry',
    'ErrorCapture',
    'InvalidComponent',
    'InvalidComponentOptions',
    'MissingLibrary',
    'UnknownComponent',
    'check_options',
    'near_misses',
]
