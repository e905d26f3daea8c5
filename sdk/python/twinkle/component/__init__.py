"""Components chosen by name: losses, metrics, processors, optimizers, schedules."""

from twinkle.component.registry import ComponentRegistry, InvalidComponentOptions, UnknownComponent, check_options

__all__ = ['ComponentRegistry', 'InvalidComponentOptions', 'UnknownComponent', 'check_options']
