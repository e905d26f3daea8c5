"""Components chosen by name: losses, metrics, processors, optimizers, schedules."""

from twinkle.component.registry import (
    ComponentRegistry,
    InvalidComponent,
    InvalidComponentOptions,
    UnknownComponent,
    check_options,
)

__all__ = ['ComponentRegistry', 'InvalidComponent', 'InvalidComponentOptions', 'UnknownComponent', 'check_options']
