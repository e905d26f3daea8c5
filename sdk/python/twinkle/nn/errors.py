"""Errors of the forward path. All are raised before anything is computed or changed."""

from twinkle.data_format.lora import TARGET_GROUPS


class PackError(ValueError):
    """Spans, token ids and positions of a pack are inconsistent."""


class UnknownTargetModules(ValueError):
    """A LoRA configuration names layers the model does not have."""

    def __init__(self, unknown: list[str], known: list[str]) -> None:
        groups = ', '.join(map(repr, TARGET_GROUPS))
        super().__init__(f'target_modules {unknown} match no linear layer; use {groups} or some of {known}')
        self.unknown = unknown
        self.known = known


class UnsupportedModel(ValueError):
    """The packed forward path does not support an operation of the base model."""


class UnknownParameters(ValueError):
    """Full-parameter training names parameters the model does not have."""

    def __init__(self, unknown: list[str], known: list[str]) -> None:
        super().__init__(f'target_modules {unknown} match no parameter; leave them out or use some of {known}')
        self.unknown = unknown
        self.known = known
