"""Interface of the trainers of this package."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.data_format import InputFeature, ModelOutput, Trajectory

Inputs = InputFeature | Trajectory | Sequence[InputFeature] | Sequence[Trajectory]
"""One example or several; chats are encoded by the adapter's template."""


class TwinkleModel(ABC):
    """Base model with adapters in training.

    `add_adapter_to_model` requires `adapter_name`. The other methods require it only if there are several adapters. For
    arguments that are not described here, and for errors, see the methods of `TransformersModel`.
    """

    @abstractmethod
    def add_adapter_to_model(
        self,
        adapter_name: str,
        config_or_dir: Any = None,
        *,
        full_parameters: bool = False,
        gradient_accumulation_steps: int = 1,
    ) -> None:
        """Add an adapter.

        Args:
            adapter_name: a new name.
            config_or_dir: `LoraConfig` of this library or of peft, or a peft folder with initial weights.
            full_parameters: whether to train the base model's weights instead of an adapter.
            gradient_accumulation_steps: number of batches per optimizer step.
        """

    @abstractmethod
    def set_optimizer(self, optimizer_cls: Any, *, adapter_name: str | None = None, **options: Any) -> None:
        """Replace the optimizer, given by name or class. This removes the schedule."""

    @abstractmethod
    def set_lr_scheduler(self, scheduler_cls: Any, *, adapter_name: str | None = None, **options: Any) -> None:
        """Replace the schedule, given by name or class."""

    @abstractmethod
    def set_loss(self, loss_cls: Any, *, adapter_name: str | None = None, **options: Any) -> None:
        """Replace the loss, given by name, class, instance or function."""

    @abstractmethod
    def set_processor(self, processor_cls: Any, *, adapter_name: str | None = None, **options: Any) -> None:
        """Replace the input processor, given by name, class or instance."""

    @abstractmethod
    def set_template(self, template_cls: Any, *, adapter_name: str | None = None, **options: Any) -> None:
        """Set the template that encodes chats, given by name, plugin id, class or instance."""

    @abstractmethod
    def add_metric(
        self, metric_cls: Any, *, is_training: bool = True, adapter_name: str | None = None, **options: Any
    ) -> None:
        """Add a metric of training or, if `is_training` is false, of forward-only batches."""

    @abstractmethod
    def forward_only(self, inputs: Inputs, *, adapter_name: str | None = None, **options: Any) -> ModelOutput:
        """Return loss and log-probabilities without computing a gradient."""

    @abstractmethod
    def forward(self, inputs: Inputs, *, adapter_name: str | None = None, **options: Any) -> ModelOutput:
        """Return log-probabilities and store the activations for `calculate_loss` and `backward`."""

    @abstractmethod
    def calculate_loss(self, *, adapter_name: str | None = None) -> float:
        """Return the loss of the last `forward`."""

    @abstractmethod
    def backward(self, *, logprob_gradients: Sequence[Any] | None = None, adapter_name: str | None = None) -> None:
        """Accumulate the gradient of the last `calculate_loss`, or of a custom loss.

        Args:
            logprob_gradients: float [T] for each example of T tokens: derivative of the custom loss with respect to
                each label's log-probability. None uses the loss of the last `calculate_loss`.
            adapter_name: see the class.
        """

    @abstractmethod
    def forward_backward(self, inputs: Inputs, *, adapter_name: str | None = None, **options: Any) -> ModelOutput:
        """Run forward, calculate_loss and backward."""

    @abstractmethod
    def forward_backward_custom(
        self, inputs: Inputs, loss_fn: Any, *, adapter_name: str | None = None, **options: Any
    ) -> ModelOutput:
        """Accumulate the gradient of a function of the log-probabilities."""

    @abstractmethod
    def clip_grad_norm(
        self,
        max_grad_norm: float = 1.0,
        norm_type: float = 2.0,
        *,
        max_grad_value: float | None = None,
        adapter_name: str | None = None,
    ) -> float | None:
        """Clip the gradient's elements to `max_grad_value`, if it is given, and then its norm.

        Returns:
            The norm before it is clipped, or None while accumulating.
        """

    @abstractmethod
    def step(
        self, *, learning_rate: float | None = None, return_health: bool = False, adapter_name: str | None = None
    ) -> Any:
        """Apply the accumulated gradient if it has enough batches; return a `StepResult`."""

    @abstractmethod
    def zero_grad(self, *, adapter_name: str | None = None) -> None:
        """Clear the gradient and discard a pending `forward`, unless the gradient is still accumulating."""

    @abstractmethod
    def lr_step(self, *, adapter_name: str | None = None) -> None:
        """Advance the schedule by one step, unless the gradient is still accumulating."""

    @abstractmethod
    def clip_grad_and_step(
        self,
        max_grad_norm: float = 1.0,
        norm_type: float = 2.0,
        *,
        max_grad_value: float | None = None,
        return_health: bool = False,
        adapter_name: str | None = None,
        **step_options: Any,
    ) -> Any:
        """Run clip_grad_norm, step, zero_grad and, if there is a schedule, lr_step; return the result of the step."""

    @abstractmethod
    def calculate_metric(self, is_training: bool = True, *, adapter_name: str | None = None) -> dict[str, float]:  # noqa: FBT001, FBT002 - an established signature
        """Return the training or evaluation metrics accumulated since the last such call, and reset them."""

    @abstractmethod
    def save(
        self,
        name: str,
        output_dir: str | None = None,
        *,
        adapter_name: str | None = None,
        save_optimizer: bool = False,
        consumed_train_samples: int = 0,
        merge_lora: bool = False,
    ) -> str:
        """Save a checkpoint; return its location."""

    @abstractmethod
    def load(
        self,
        name: str,
        output_dir: str | None = None,
        *,
        adapter_name: str | None = None,
        load_optimizer: bool = False,
    ) -> None:
        """Load the adapter's weights and, with `load_optimizer`, its training state from a checkpoint."""

    @abstractmethod
    def resume_from_checkpoint(
        self, checkpoint_dir: str, *, resume_only_model: bool = False, adapter_name: str | None = None
    ) -> Mapping[str, int]:
        """Load a checkpoint with its training state, and return its counters.

        With `resume_only_model`, load only the weights and return no counters.
        """

    @abstractmethod
    def get_state_dict(self, *, adapter_name: str | None = None) -> dict[str, Any]:
        """Return the adapter's weights by peft's names, or a full-parameter run's weights by the model's names."""

    @abstractmethod
    def get_train_configs(self, *, adapter_name: str | None = None) -> str:
        """Return a readable description of the adapter's training configuration."""
