"""Errors of the forward path."""

from twinkle.data_format.lora import TARGET_GROUPS
from twinkle.errors import error_class


class PackError(ValueError):
    """The inputs of a pass do not fit together, do not fit the model, or exceed a cache."""


@error_class()
class UnknownTargetModules(ValueError):
    """A LoRA configuration names layers that the model does not have."""

    unknown: list[str]
    known: list[str]

    def __str__(self) -> str:
        groups = ', '.join(map(repr, TARGET_GROUPS))
        return f'target_modules {self.unknown} match no layer; use {groups} or some of {self.known}'


@error_class('lora_dropout must be 0 if target_modules includes experts ({path}); peft does not support it there')
class ExpertDropout(ValueError):
    """A LoRA configuration has dropout for the experts of a mixture."""

    path: str


class UnsupportedModel(ValueError):
    """The base model, or the requested use of it, is not supported."""


@error_class('target_modules {unknown!r} match no parameter; leave them out, or use some of {known!r}')
class UnknownParameters(ValueError):
    """Full-parameter training names parameters that the model does not have."""

    unknown: list[str]
    known: list[str]
