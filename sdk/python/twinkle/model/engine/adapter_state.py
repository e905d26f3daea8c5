"""One adapter in training: its weights and everything that belongs to it alone."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from twinkle.data_format import LoraConfig, LossOutput
from twinkle.loss import CrossEntropyLoss, Loss
from twinkle.metric import LossMetric, Metric, TrainMetric
from twinkle.model.engine.optimization import ComponentChoice, Optimization
from twinkle.model.engine.value_head import ValueHead
from twinkle.nn import FullWeights, LoraWeights
from twinkle.processor import InputProcessor, PackedBatch

if TYPE_CHECKING:
    from twinkle.model.engine.pass_outputs import SegmentOutputs


@dataclass
class PendingForward:
    """A forward pass whose activations are kept."""

    batch: PackedBatch
    outputs: 'SegmentOutputs'
    """With gradient."""
    output: LossOutput | None = None
    """Once the loss was calculated."""


@dataclass(frozen=True)
class MetricInUse:
    """A metric and how it was asked for."""

    metric: Metric
    choice: ComponentChoice

    @classmethod
    def by_default(cls, metric: Metric) -> 'MetricInUse':
        """Return a metric built without options."""
        return cls(metric, ComponentChoice(type(metric).__name__, {}))


@dataclass
class AdapterState:
    """Mutable; owned by the engine's one thread."""

    adapter_id: str
    weights: LoraWeights | FullWeights
    optimization: Optimization
    value_head: ValueHead | None = None
    """Once a loss that learns values was set."""
    loss: Loss = field(default_factory=CrossEntropyLoss)
    loss_choice: ComponentChoice = field(default_factory=lambda: ComponentChoice('CrossEntropyLoss', {}))
    processor: InputProcessor = field(default_factory=InputProcessor)
    processor_choice: ComponentChoice = field(default_factory=lambda: ComponentChoice('InputProcessor', {}))
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
    metrics_in_training: tuple[MetricInUse, ...] = field(
        default_factory=lambda: (MetricInUse.by_default(LossMetric()), MetricInUse.by_default(TrainMetric()))
    )
    metrics_in_evaluation: tuple[MetricInUse, ...] = field(
        default_factory=lambda: (MetricInUse.by_default(LossMetric()),)
    )

    @classmethod
    def create(
        cls, adapter_id: str, weights: LoraWeights | FullWeights, *, gradient_accumulation_steps: int
    ) -> 'AdapterState':
        """Return a new adapter's state: AdamW with torch's defaults, cross-entropy, no schedule."""
        optimization = Optimization.begin(ComponentChoice('AdamW', {}), weights.named_parameters())
        return cls(adapter_id, weights, optimization, gradient_accumulation_steps=gradient_accumulation_steps)

    @property
    def config(self) -> LoraConfig | None:
        """What the weights were made from, the seed included; None where they are the base model's own."""
        return self.weights.config

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of all parameters."""
        return self.optimization.optimizer

    @property
    def optimizer_choice(self) -> ComponentChoice:
        """How the optimizer was asked for."""
        return self.optimization.optimizer_choice

    @property
    def scheduler(self) -> LRScheduler | None:
        """The schedule of its rate."""
        return self.optimization.scheduler

    @property
    def scheduler_choice(self) -> ComponentChoice | None:
        """How the schedule was asked for."""
        return self.optimization.scheduler_choice

    @property
    def learning_rate(self) -> float:
        """Of the first parameter group, as the schedule set it."""
        return float(self.optimizer.param_groups[0]['lr'])

    def metrics(self, *, is_training: bool) -> list[Metric]:
        """Return what reports batches of that kind."""
        return self.train_metrics if is_training else self.eval_metrics

    @property
    def train_metrics(self) -> list[Metric]:
        """What reports training."""
        return [used.metric for used in self.metrics_in_training]

    @property
    def eval_metrics(self) -> list[Metric]:
        """What reports batches that are only run forward."""
        return [used.metric for used in self.metrics_in_evaluation]

    @property
    def is_accumulating(self) -> bool:
        """Whether some, but not yet enough batches are accumulated for a step."""
        return 0 < self.batch_count < self.gradient_accumulation_steps

    def named_parameters(self) -> dict[str, Tensor]:
        """Return everything that is trained, in a fixed order: A and B of each layer, then the value head."""
        head = {} if self.value_head is None else self.value_head.named_parameters()
        return {**self.weights.named_parameters(), **head}

    def parameters(self) -> list[Tensor]:
        """Return what `named_parameters` returns, without the names."""
        return list(self.named_parameters().values())

    def add_value_head(self, head: ValueHead) -> None:
        """Train a value head too; optimizer and schedule go on as they are for all else."""
        self.optimization = self.optimization.over_more({**self.named_parameters(), **head.named_parameters()})
        self.value_head = head

    @contextmanager
    def undoing_configuration(self) -> Iterator[None]:
        """Put optimizer, schedule, loss, processor, metrics and accumulation back if the block fails."""
        names = (
            'optimization', 'value_head', 'loss', 'loss_choice', 'processor', 'processor_choice',
            'gradient_accumulation_steps', 'metrics_in_training', 'metrics_in_evaluation',
        )  # fmt: skip
        before: Mapping[str, Any] = {name: getattr(self, name) for name in names}
        groups = self.optimization.copy_groups()
        try:
            yield
        except BaseException:
            for name, value in before.items():
                setattr(self, name, value)
            self.optimization.replace_groups(groups)
            raise

    def drop_gradient(self) -> None:
        """Forget the accumulated gradient and the pending forward pass."""
        for parameter in self.parameters():
            parameter.grad = None
        self.batch_count, self.divisor, self.grad_norm, self.pending = 0, 0, None, None
