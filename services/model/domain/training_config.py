"""How an adapter is trained."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Component:
    """Something chosen by name, with its constructor's arguments."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True)
class LossChoice(Component):
    """The loss, and whether the step divides by the number of labels."""

    is_mean: bool | None = None
    """None: not said; taken as False. In use: the loss scales its gradient itself."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """What may change while an adapter lives. In a change, None leaves a part as it is."""

    optimizer: Component | None = None
    """A class of torch.optim; the learning rate is the option `lr`."""
    lr_scheduler: Component | None = None
    loss: LossChoice | None = None
    gradient_accumulation_steps: int | None = None
    processor: Component | None = None
    template: Component | None = None
    metrics: tuple[Component, ...] = ()
    """Of training batches; a change adds them."""
    evaluation_metrics: tuple[Component, ...] = ()
    """Of forward-only batches; a change adds them."""
    patches: tuple[Component, ...] = ()
