"""State of one adapter in training: its weights, optimizer, schedule, loss, input processor and metrics."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from twinkle.data_format import LoraConfig, LossOutput
from twinkle.loss import CrossEntropyLoss, Loss, LossBatch
from twinkle.metric import LossMetric, Metric, TrainMetric
from twinkle.model.engine.optimization import ComponentChoice, Optimization
from twinkle.model.engine.owner import AdapterOwner
from twinkle.model.engine.value_head import ValueHead
from twinkle.nn import FullWeights, LoraWeights
from twinkle.processor import InputProcessor, PackedBatch


@dataclass(frozen=True)
class SegmentOutputs:
    """Outputs of a pass for one adapter."""

    loss_batch: LossBatch
    is_greedy_R: Tensor | None
    """Whether each label is the most likely token; None unless a metric reads it."""
    routed_experts_TLA: Tensor | None = None
    """Experts of each token of the adapter, if they were requested."""


@dataclass
class PendingForward:
    """Forward pass with stored activations."""

    batch: PackedBatch
    outputs: SegmentOutputs
    """Outputs that are connected to the autograd graph of the pass."""
    shared_token_count: int = 0
    """Number of tokens whose results were taken from an equal prefix of another sequence in the same pass."""
    output: LossOutput | None = None
    """Output of the loss; None until `calculate_loss` is called."""


@dataclass(frozen=True)
class ConfiguredMetric:
    """Metric with the name and options it was built from."""

    metric: Metric
    choice: ComponentChoice

    @classmethod
    def by_default(cls, metric: Metric) -> 'ConfiguredMetric':
        """Return a metric built without options."""
        return cls(metric, ComponentChoice(type(metric).__name__, {}))


@dataclass
class AdapterState:
    """Mutable state of an adapter.

    Concurrency: only the engine's thread may use it.
    """

    adapter_id: str
    weights: LoraWeights | FullWeights
    optimization: Optimization
    owner: AdapterOwner | None = None
    """Rank that holds the gradient and the optimizer's state; None if every rank holds them."""
    value_head: ValueHead | None = None
    """Value head; None until a loss that needs one is set."""
    loss: Loss = field(default_factory=CrossEntropyLoss)
    loss_choice: ComponentChoice = field(default_factory=lambda: ComponentChoice('CrossEntropyLoss', {}))
    processor: InputProcessor = field(default_factory=InputProcessor)
    processor_choice: ComponentChoice = field(default_factory=lambda: ComponentChoice('InputProcessor', {}))
    gradient_accumulation_steps: int = 1
    batch_count: int = 0
    """Number of batches in the accumulated gradient."""
    divisor: int = 0
    """Number by which the optimizer step divides the accumulated gradient; 0 means no division."""
    step_count: int = 0
    """Number of applied optimizer steps."""
    grad_norm: float | None = None
    """Gradient norm from the most recent clipping, after division by `divisor` and before the norm was clipped; None if
    the accumulated gradient was not clipped."""
    pending: PendingForward | None = None
    metrics_in_training: tuple[ConfiguredMetric, ...] = field(
        default_factory=lambda: (ConfiguredMetric.by_default(LossMetric()), ConfiguredMetric.by_default(TrainMetric()))
    )
    metrics_in_evaluation: tuple[ConfiguredMetric, ...] = field(
        default_factory=lambda: (ConfiguredMetric.by_default(LossMetric()),)
    )

    @classmethod
    def create(
        cls,
        adapter_id: str,
        weights: LoraWeights | FullWeights,
        *,
        gradient_accumulation_steps: int,
        owner: AdapterOwner | None = None,
    ) -> 'AdapterState':
        """Return a new adapter's state: AdamW with torch's defaults, cross-entropy and no schedule."""
        optimization = Optimization.begin(ComponentChoice('AdamW', {}), weights.named_parameters())
        return cls(adapter_id, weights, optimization, owner, gradient_accumulation_steps=gradient_accumulation_steps)

    @property
    def config(self) -> LoraConfig | None:
        """LoRA configuration, including the seed; None for full-parameter training."""
        return self.weights.config

    @property
    def optimizer(self) -> Optimizer:
        """Optimizer of all parameters."""
        return self.optimization.optimizer

    @property
    def optimizer_choice(self) -> ComponentChoice:
        """Name and options of the optimizer."""
        return self.optimization.optimizer_choice

    @property
    def scheduler(self) -> LRScheduler | None:
        """Schedule of the learning rate."""
        return self.optimization.scheduler

    @property
    def scheduler_choice(self) -> ComponentChoice | None:
        """Name and options of the schedule."""
        return self.optimization.scheduler_choice

    @property
    def learning_rate(self) -> float:
        """Current learning rate of the first parameter group."""
        return float(self.optimizer.param_groups[0]['lr'])

    def metrics(self, *, is_training: bool) -> list[Metric]:
        """Return the metrics of training, or of forward-only batches."""
        return self.train_metrics if is_training else self.eval_metrics

    @property
    def train_metrics(self) -> list[Metric]:
        """Metrics of training."""
        return [used.metric for used in self.metrics_in_training]

    @property
    def eval_metrics(self) -> list[Metric]:
        """Metrics of forward-only batches."""
        return [used.metric for used in self.metrics_in_evaluation]

    @property
    def is_accumulating(self) -> bool:
        """Whether batches are accumulated, but fewer than an optimizer step needs."""
        return 0 < self.batch_count < self.gradient_accumulation_steps

    @property
    def is_held_here(self) -> bool:
        """Whether this rank holds the gradient and the optimizer's state."""
        return self.owner is None or self.owner.is_this_rank

    def named_parameters(self) -> dict[str, Tensor]:
        """Return all trained tensors in a fixed order: first of `weights`, then of the value head."""
        head = {} if self.value_head is None else self.value_head.named_parameters()
        return {**self.weights.named_parameters(), **head}

    def parameters(self) -> list[Tensor]:
        """Return the tensors of `named_parameters`."""
        return list(self.named_parameters().values())

    def replace_optimization(self, optimization: Optimization) -> None:
        """Replace optimizer and schedule; only the owner keeps the optimizer's state."""
        if not self.is_held_here:
            optimization.optimizer.state.clear()
        self.optimization = optimization

    def add_value_head(self, head: ValueHead) -> None:
        """Add a value head to the trained parameters; the state of optimizer and schedule is preserved."""
        parameters = {**self.named_parameters(), **head.named_parameters()}
        self.replace_optimization(self.optimization.extended(parameters))
        self.value_head = head

    @contextmanager
    def restoring_configuration(self) -> Iterator[None]:
        """Restore the configuration, including `gradient_accumulation_steps` and the value head, if the block fails."""
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
        """Clear the accumulated gradient and its counters, and discard the pending forward pass."""
        for parameter in self.parameters():
            parameter.grad = None
        self.batch_count, self.divisor, self.grad_norm, self.pending = 0, 0, None, None
