"""The training configuration of an adapter."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Component:
    """A component chosen by name, with its constructor's arguments."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True)
class LossChoice(Component):
    """The loss and its reduction."""

    is_mean: bool | None = None
    """Whether the step divides by the number of labels. In a request, None means False. In the configuration in use,
    None means that the loss scales its gradient itself."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Settings that may change after an adapter's creation. In a change, None leaves a setting unchanged."""

    optimizer: Component | None = None
    """A class of torch.optim; the option `lr` is the learning rate."""
    lr_scheduler: Component | None = None
    loss: LossChoice | None = None
    gradient_accumulation_steps: int | None = None
    processor: Component | None = None
    template: Component | None = None
    metrics: tuple[Component, ...] = ()
    """Metrics of training batches; a change adds metrics."""
    evaluation_metrics: tuple[Component, ...] = ()
    """Metrics of forward-only batches; a change adds metrics."""
    patches: tuple[Component, ...] = ()
    """Refused unless empty: patches change the base model of all tenants, so only the operator may choose them."""
