"""The verbs of training, on one device."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from twinkle.data_format import InputFeature, LoraConfig
from twinkle.loss import build_loss
from twinkle.metric import METRICS, StepFacts
from twinkle.model.engine.adapter_state import AdapterState, ComponentChoice, PendingForward
from twinkle.model.engine.batch_runner import BatchRunner, check_trainable, logprob_gradient
from twinkle.model.engine.forward_pass import check_loss, gradient_of, loss_of, pending_forward, undoing_dropout_draws
from twinkle.model.engine.gradient import add_gradient, apply_gradient, check_gradient, clip_gradient, sum_gradients
from twinkle.model.engine.reports import forward_result, result_of_pending, step_result
from twinkle.model.engine.results import BatchItem, ForwardOptions, ForwardResult, StepResult
from twinkle.model.engine.snapshot import AdapterSnapshot, restore_snapshot, take_snapshot
from twinkle.model.errors import AdapterExists, AdapterNotReady, InvalidArgument, TrainerError, UnknownAdapter
from twinkle.nn import LoraWeights, PackedCausalLM
from twinkle.processor import PROCESSORS, PackedBatch

_LARGEST_RATE = torch.finfo(torch.float32).max
"""Optimizers multiply float32 weights by the rate; torch raises in the middle of a step for more."""


class TrainerEngine:
    """Many adapters on one frozen model, each with its own optimizer, schedule, loss and metrics.

    Every verb either does all of its work or raises and changes nothing. An accumulated gradient is
    applied once `gradient_accumulation_steps` batches are in it: until then clip_grad_norm, step,
    zero_grad and lr_step do nothing.

    Args:
        model: shared by all adapters.
        max_pass_tokens: a batch of more tokens runs in several passes whose gradients are added up,
            where its loss is a sum over features. Bounds memory.

    Concurrency: drive it from one thread.
    """

    def __init__(self, model: PackedCausalLM, *, max_pass_tokens: int = 1024) -> None:
        self.model = model
        self._runner = BatchRunner(model, max_pass_tokens=max_pass_tokens)
        self._adapters: dict[str, AdapterState] = {}

    # Adapters

    @property
    def adapter_ids(self) -> tuple[str, ...]:
        """The adapters there are, oldest first."""
        return tuple(self._adapters)

    def adapter(self, adapter_id: str) -> AdapterState:
        """Return an adapter's state; to be read only.

        Raises:
            UnknownAdapter: there is none.
        """
        try:
            return self._adapters[adapter_id]
        except KeyError:
            raise UnknownAdapter(adapter_id) from None

    def create_adapter(
        self, adapter_id: str, config: LoraConfig, *, gradient_accumulation_steps: int = 1
    ) -> AdapterState:
        """Make an adapter with fresh weights, AdamW with torch's defaults, mean cross-entropy and no schedule.

        Raises:
            AdapterExists: the id is taken.
            UnknownTargetModules: the configuration names layers the model does not have.
            InvalidArgument: a number is out of range.
        """
        if adapter_id in self._adapters:
            raise AdapterExists(adapter_id)
        _check_accumulation(gradient_accumulation_steps)
        seed = config.seed if config.seed is not None else int(torch.randint(2**31, ()))
        weights = LoraWeights.create(
            self.model.layers, replace(config, seed=seed), seed=seed, device=str(self.model.device), is_trainable=True
        )
        state = AdapterState.create(adapter_id, weights, gradient_accumulation_steps=gradient_accumulation_steps)
        self._adapters[adapter_id] = state
        return state

    def delete_adapter(self, adapter_id: str) -> None:
        """Forget an adapter.

        Raises:
            UnknownAdapter: there is none.
        """
        self.adapter(adapter_id)
        del self._adapters[adapter_id]

    # Configuration

    def set_optimizer(self, adapter_id: str, optimizer: Any, /, **options: Any) -> None:
        """Replace the optimizer by one given by name or class; its state and the schedule begin anew.

        Raises:
            UnknownComponent: the name is not known.
            InvalidComponentOptions: an option is unknown or out of range.
        """
        self.adapter(adapter_id).set_optimizer(ComponentChoice(optimizer, options))

    def set_lr_scheduler(self, adapter_id: str, scheduler: Any, /, **options: Any) -> None:
        """Replace the schedule; raises as `set_optimizer`."""
        self.adapter(adapter_id).set_scheduler(ComponentChoice(scheduler, options))

    def set_loss(self, adapter_id: str, loss: Any, /, **options: Any) -> None:
        """Replace the loss by one given by name, class, instance or function; raises as `set_optimizer`."""
        state = self.adapter(adapter_id)
        built = build_loss(loss, **options)
        state.loss, state.loss_choice = built, ComponentChoice(type(built), options)

    @contextmanager
    def all_or_nothing(self, adapter_id: str) -> Iterator[None]:
        """Undo every change of configuration in the block if one of them is refused."""
        with self.adapter(adapter_id).undoing_configuration():
            yield

    def set_processor(self, adapter_id: str, processor: Any, /, **options: Any) -> None:
        """Replace the input processor; raises as `set_optimizer`."""
        self.adapter(adapter_id).processor = PROCESSORS.build(processor, options)

    def set_gradient_accumulation_steps(self, adapter_id: str, steps: int) -> None:
        """Set how many batches make a step.

        Raises:
            InvalidArgument: fewer than 1.
        """
        _check_accumulation(steps)
        self.adapter(adapter_id).gradient_accumulation_steps = steps

    def add_metric(self, adapter_id: str, metric: Any, /, *, is_training: bool = True, **options: Any) -> None:
        """Report one more metric, of training or of forward-only batches; raises as `set_optimizer`."""
        state = self.adapter(adapter_id)
        built = METRICS.build(metric, options)
        (state.train_metrics if is_training else state.eval_metrics).append(built)

    # Forward and backward

    def check_features(self, adapter_id: str, features: Sequence[InputFeature]) -> PackedBatch:
        """Check a batch as the verbs would, without running it.

        Raises:
            InvalidFeatures: names the feature, the field and the cure.
            MissingStream: the loss needs what the features do not carry.
        """
        return self._runner.pack(self.adapter(adapter_id), features)

    def run_batch(self, items: Sequence[BatchItem]) -> list[ForwardResult | Exception]:
        """Run batches of several adapters together: each gets the very bits it would get alone.

        Args:
            items: at most one for each adapter.

        Returns:
            In the order of `items`: the result, or why that item alone was refused; what
            `forward_only` and `forward_backward` raise, as values. A refused item changed nothing.

        Raises:
            InvalidArgument: two items are of one adapter.
        """
        if len({item.adapter_id for item in items}) < len(items):
            raise InvalidArgument('items must be of different adapters')
        return [self._run_item(item) for item in items]

    def _run_item(self, item: BatchItem) -> ForwardResult | Exception:
        verb = self.forward_backward if item.is_training else self.forward_only
        try:
            return verb(item.adapter_id, item.features, options=item.options)
        except (TrainerError, ValueError) as error:
            return error

    def forward_only(
        self, adapter_id: str, features: Sequence[InputFeature], *, options: ForwardOptions | None = None
    ) -> ForwardResult:
        """Return losses and log-probabilities; changes nothing but the evaluation metrics.

        Raises:
            InvalidFeatures, MissingStream: as `check_features`.
            LossNotFinite: the model gave no finite loss.
        """
        state = self.adapter(adapter_id)
        parts = self._runner.parts(state, features)
        results = self._runner.run(state, parts, options or ForwardOptions(), is_training=False)
        return forward_result(features, parts, results, metrics=state.eval_metrics)

    def forward_backward(
        self, adapter_id: str, features: Sequence[InputFeature], *, options: ForwardOptions | None = None
    ) -> ForwardResult:
        """Return losses and log-probabilities, and add the loss's gradient to the accumulated one.

        Raises:
            InvalidFeatures, MissingStream: as `check_features`, or no label counts.
            LossNotFinite: no gradient was added.
        """
        state, options = self.adapter(adapter_id), options or ForwardOptions()
        parts = self._runner.parts(state, features)
        check_trainable(parts, options)
        with undoing_dropout_draws(state):
            results = self._runner.run(state, parts, options, is_training=True)
            gradient = None
            for result in results:
                gradient = sum_gradients(gradient, result.gradient)
            check_gradient(state, gradient)
        add_gradient(state, gradient, divisor=sum(result.divisor for result in results))
        return forward_result(features, parts, results, metrics=state.train_metrics)

    def forward(
        self, adapter_id: str, features: Sequence[InputFeature], *, options: ForwardOptions | None = None
    ) -> ForwardResult:
        """Run a batch in one pass, keep its activations, and return its log-probabilities; the loss is 0 as yet.

        Raises:
            InvalidFeatures, MissingStream: as `forward_backward`.
        """
        state, options = self.adapter(adapter_id), options or ForwardOptions()
        batch = self._runner.pack(state, features)
        check_trainable([batch], options)
        with undoing_dropout_draws(state):
            state.pending = pending_forward(self.model, state, batch, options=options)
        return forward_result((), [batch], [result_of_pending(state.pending)], metrics=())

    def calculate_loss(self, adapter_id: str) -> ForwardResult:
        """Return the loss of the last `forward`.

        Raises:
            AdapterNotReady: there is none.
            LossNotFinite: the model gave no finite loss.
        """
        state, pending = self._pending(adapter_id)
        with torch.enable_grad():
            output = loss_of(state.loss, pending.batch, pending.logps_R)
        check_loss(state, pending.batch, pending.logps_R, output)
        pending.output = output
        return forward_result((), [pending.batch], [result_of_pending(pending)], metrics=())

    def backward(
        self, adapter_id: str, *, logprob_gradients: Sequence[npt.NDArray[np.float32]] | None = None
    ) -> ForwardResult:
        """Add the gradient of the last `forward` to the accumulated one, and drop its activations.

        Args:
            adapter_id: the adapter.
            logprob_gradients: float32 [T] for each feature: gradient of the caller's own loss by each
                label's log-probability. Unset: the gradient of the last `calculate_loss`.

        Raises:
            AdapterNotReady: there was no forward, or no calculate_loss.
            InvalidFeatures: the given gradients do not fit the batch.
            LossNotFinite: no gradient was added.
        """
        state, pending = self._pending(adapter_id)
        if logprob_gradients is None:
            if pending.output is None:
                raise AdapterNotReady(adapter_id, 'calculate_loss before backward')
            gradient = gradient_of(state, pending.output['loss'])
        else:
            by_output = logprob_gradient(pending, logprob_gradients)
            gradient = gradient_of(state, pending.logps_R, by_output=by_output)
        check_gradient(state, gradient)
        result = result_of_pending(pending)
        state.pending = None
        add_gradient(state, gradient, divisor=result.divisor if logprob_gradients is None else 0)
        return forward_result((), [pending.batch], [result], metrics=state.train_metrics)

    # Steps

    def clip_grad_norm(self, adapter_id: str, *, max_grad_norm: float = 1.0, norm_type: float = 2.0) -> float | None:
        """Scale the gradient so that its norm is at most `max_grad_norm`.

        Returns:
            The norm before, of the gradient as the step will use it; None while accumulating.

        Raises:
            InvalidArgument: a number is not positive.
            AdapterNotReady: there is no gradient.
        """
        for name, value in (('max_grad_norm', max_grad_norm), ('norm_type', norm_type)):
            if not value > 0.0:
                raise InvalidArgument(f'{name} must be positive, got {value}')
        state = self._with_gradient(adapter_id)
        return None if state.is_accumulating else clip_gradient(state, max_grad_norm=max_grad_norm, norm_type=norm_type)

    def step(self, adapter_id: str, *, learning_rate: float | None = None) -> StepResult:
        """Apply the accumulated gradient, which stays until `zero_grad`.

        Args:
            adapter_id: the adapter.
            learning_rate: for this step alone, at least 0. Unset: as the schedule says.

        Raises:
            AdapterNotReady: there is no gradient, or the schedule left no finite learning rate.
            InvalidArgument: the learning rate is negative or not finite as float32.
        """
        if learning_rate is not None and not 0.0 <= learning_rate <= _LARGEST_RATE:
            raise InvalidArgument(f'learning_rate must be at least 0 and finite as float32, got {learning_rate}')
        state = self._with_gradient(adapter_id)
        if learning_rate is None and not abs(state.learning_rate) <= _LARGEST_RATE:
            raise AdapterNotReady(adapter_id, 'a finite learning rate: set the optimizer or the schedule anew')
        if state.is_accumulating:
            return step_result(state, is_applied=False)
        rate = apply_gradient(state, learning_rate=learning_rate)
        facts = StepFacts(learning_rate=rate, step_count=state.step_count, grad_norm=state.grad_norm)
        for metric in state.train_metrics:
            metric.accumulate_step(facts)
        return StepResult(is_applied=True, grad_norm=state.grad_norm, learning_rate=rate, step_count=state.step_count)

    def zero_grad(self, adapter_id: str) -> None:
        """Drop the gradient, unless it is still accumulating."""
        state = self.adapter(adapter_id)
        if not state.is_accumulating:
            state.drop_gradient()

    def lr_step(self, adapter_id: str) -> StepResult:
        """Move the schedule by one step, unless the gradient is still accumulating.

        Raises:
            AdapterNotReady: there is no schedule, or all its moves were made.
        """
        state = self.adapter(adapter_id)
        if state.scheduler is None:
            raise AdapterNotReady(adapter_id, 'a schedule: call set_lr_scheduler')
        is_applied = not state.is_accumulating
        if is_applied:
            try:
                state.scheduler.step()
            except (ValueError, ArithmeticError) as error:
                raise AdapterNotReady(adapter_id, 'a schedule with moves left: set a new one') from error
        return step_result(state, is_applied=is_applied)

    def clip_grad_and_step(self, adapter_id: str, *, max_grad_norm: float = 1.0, norm_type: float = 2.0) -> StepResult:
        """Do clip_grad_norm, step, zero_grad and, where there is a schedule, lr_step; raises as they do."""
        self.clip_grad_norm(adapter_id, max_grad_norm=max_grad_norm, norm_type=norm_type)
        result = self.step(adapter_id)
        if result.is_applied:
            self.zero_grad(adapter_id)
            if self.adapter(adapter_id).scheduler is not None:
                self.lr_step(adapter_id)
        return result

    def calculate_metric(self, adapter_id: str, *, is_training: bool = True) -> dict[str, float]:
        """Return what the metrics gathered since the last call, and begin anew."""
        state = self.adapter(adapter_id)
        values: dict[str, float] = {}
        for metric in state.train_metrics if is_training else state.eval_metrics:
            values.update(metric.calculate())
            metric.reset()
        return values

    # State

    def export_state(self, adapter_id: str, *, is_optimizer_included: bool, **extra: int) -> AdapterSnapshot:
        """Copy an adapter's state; `extra` are counters of the caller's own to keep with it."""
        return take_snapshot(self.adapter(adapter_id), is_optimizer_included=is_optimizer_included, extra=extra)

    def import_state(self, adapter_id: str, snapshot: AdapterSnapshot, *, is_optimizer_included: bool) -> None:
        """Replace an adapter's weights and, where asked for, everything else it needs to go on.

        Raises:
            SnapshotMismatch: it does not fit; nothing was changed.
        """
        restore_snapshot(self.adapter(adapter_id), snapshot, is_optimizer_included=is_optimizer_included)

    def _pending(self, adapter_id: str) -> tuple[AdapterState, PendingForward]:
        state = self.adapter(adapter_id)
        if state.pending is None:
            raise AdapterNotReady(adapter_id, 'a forward pass')
        return state, state.pending

    def _with_gradient(self, adapter_id: str) -> AdapterState:
        state = self.adapter(adapter_id)
        if not state.batch_count:
            raise AdapterNotReady(adapter_id, 'a gradient: call forward_backward')
        return state


def _check_accumulation(steps: int) -> None:
    if steps < 1:
        raise InvalidArgument(f'gradient_accumulation_steps must be at least 1, got {steps}')
