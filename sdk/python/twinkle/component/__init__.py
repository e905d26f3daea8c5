"""Components chosen by name: losses, metrics, processors, optimizers, schedules; and libraries they may lack."""

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
    'InvalidComponent',
    'InvalidComponentOptions',
    'MissingLibrary',
    'UnknownComponent',
    'check_options',
    'near_misses',
]
