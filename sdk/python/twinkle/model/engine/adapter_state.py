"""One adapter in training: its weights and everything that belongs to it alone."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from twinkle.data_format import LoraConfig, LossOutput
from twinkle.loss import CrossEntropyLoss, Loss
from twinkle.metric import LossMetric, Metric, TrainMetric
from twinkle.module import build_optimizer, build_scheduler
from twinkle.nn import LoraWeights
from twinkle.processor import InputProcessor, PackedBatch


@dataclass(frozen=True)
class ComponentChoice:
    """A component as it was asked for, so that it can be built again."""

    component: Any
    """Name or class."""
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Name of the class."""
        return self.component if isinstance(self.component, str) else self.component.__name__


@dataclass
class PendingForward:
    """A forward pass whose activations are kept."""

    batch: PackedBatch
    logps_R: Tensor
    """With gradient."""
    output: LossOutput | None = None
    """Once the loss was calculated."""


@dataclass
class AdapterState:
    """Mutable; owned by the engine's one thread."""

    adapter_id: str
    weights: LoraWeights
    optimizer: Optimizer
    optimizer_choice: ComponentChoice
    scheduler: LRScheduler | None = None
    scheduler_choice: ComponentChoice | None = None
    loss: Loss = field(default_factory=CrossEntropyLoss)
    loss_choice: ComponentChoice = field(default_factory=lambda: ComponentChoice('CrossEntropyLoss', {}))
    processor: InputProcessor = field(default_factory=InputProcessor)
    gradient_accumulation_steps: int = 1
    batch_count: int = 0
    """Batches whose gradient is accumulated."""
    divisor: int = 0
    """What the accumulated gradient is divided by at the step; 0 for not at all."""
    step_count: int = 0
    """Optimizer steps applied."""
    grad_norm: float | None = None
    """Norm of the accumulated gradient before clipping, since it was last clipped."""
    pending: PendingForward | None = None
    train_metrics: list[Metric] = field(default_factory=lambda: [LossMetric(), TrainMetric()])
    eval_metrics: list[Metric] = field(default_factory=lambda: [LossMetric()])

    @classmethod
    def create(cls, adapter_id: str, weights: LoraWeights, *, gradient_accumulation_steps: int) -> 'AdapterState':
        """Return a new adapter's state: AdamW with torch's defaults, cross-entropy, no schedule."""
        choice = ComponentChoice('AdamW', {})
        optimizer = build_optimizer('AdamW', weights.parameters(), {})
        return cls(adapter_id, weights, optimizer, choice, gradient_accumulation_steps=gradient_accumulation_steps)

    @property
    def config(self) -> LoraConfig:
        """What the weights were made from, the seed included."""
        return self.weights.config

    @property
    def is_accumulating(self) -> bool:
        """Whether some, but not yet enough batches are accumulated for a step."""
        return 0 < self.batch_count < self.gradient_accumulation_steps

    @property
    def learning_rate(self) -> float:
        """Of the first parameter group, as the schedule set it."""
        return float(self.optimizer.param_groups[0]['lr'])

    def set_optimizer(self, choice: ComponentChoice) -> None:
        """Replace the optimizer; its state begins anew and the schedule, which belonged to the old one, is dropped."""
        self.optimizer = build_optimizer(choice.component, self.weights.parameters(), choice.options)
        self.optimizer_choice = choice
        self.scheduler, self.scheduler_choice = None, None

    def set_scheduler(self, choice: ComponentChoice) -> None:
        """Replace the schedule, counting from the optimizer's own rate again."""
        # A schedule writes into the groups while it is built: begin from the optimizer's own
        # values, and put the present ones back if it is refused.
        present = [dict(group) for group in self.optimizer.param_groups]
        own = build_optimizer(
            self.optimizer_choice.component, self.weights.parameters(), self.optimizer_choice.options
        ).param_groups
        try:
            _replace_groups(self.optimizer, own)
            self.scheduler = build_scheduler(choice.component, self.optimizer, choice.options)
        except ValueError:
            _replace_groups(self.optimizer, present)
            raise
        self.scheduler_choice = choice

    @contextmanager
    def undoing_configuration(self) -> Iterator[None]:
        """Put optimizer, schedule, loss, processor, metrics and accumulation back if the block fails."""
        optimizer, groups = self.optimizer, [dict(group) for group in self.optimizer.param_groups]
        names = (
            'optimizer', 'optimizer_choice', 'scheduler', 'scheduler_choice', 'loss', 'loss_choice', 'processor',
            'gradient_accumulation_steps',
        )  # fmt: skip
        before = {name: getattr(self, name) for name in names}
        metrics = (list(self.train_metrics), list(self.eval_metrics))
        try:
            yield
        except BaseException:
            for name, value in before.items():
                setattr(self, name, value)
            _replace_groups(optimizer, groups)
            self.train_metrics, self.eval_metrics = metrics
            raise

    def drop_gradient(self) -> None:
        """Forget the accumulated gradient and the pending forward pass."""
        for parameter in self.weights.parameters():
            parameter.grad = None
        self.batch_count, self.divisor, self.grad_norm, self.pending = 0, 0, None, None


def _replace_groups(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        group.clear()
        group.update(values)
