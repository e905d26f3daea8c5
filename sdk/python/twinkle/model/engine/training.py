"""The verbs that run the model: batches of one adapter or several, forward and backward."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

from twinkle.data_format import InputFeature
from twinkle.loss import InvalidLossInput, Loss
from twinkle.model.engine.adapter_state import AdapterState, PendingForward
from twinkle.model.engine.adapters import AdapterTable
from twinkle.model.engine.batch_runner import BatchRunner, ItemRun
from twinkle.model.engine.gradient import accumulate, total_gradient
from twinkle.model.engine.joint_pass import LOSS_FAILURES, gradients_of, has_loss, loss_of
from twinkle.model.engine.memory import is_out_of_memory
from twinkle.model.engine.pass_outputs import Segment, forward_outputs
from twinkle.model.engine.purpose import Purpose
from twinkle.model.engine.reports import forward_result, result_of_pending
from twinkle.model.engine.results import BatchItem, BatchResult, ForwardOptions
from twinkle.model.errors import (
    AdapterNotReady,
    BatchTooLarge,
    InvalidArgument,
    LossNotFinite,
    MetricFailed,
    TrainerError,
)
from twinkle.nn import PackedCausalLM
from twinkle.processor import InvalidFeatures, PackedBatch


class Training(AdapterTable):
    """Runs batches and gathers their gradients.

    Args:
        model: shared by all adapters.
        max_pass_tokens: rows of one pass.
    """

    def __init__(self, model: PackedCausalLM, *, max_pass_tokens: int) -> None:
        super().__init__(model)
        self._runner = BatchRunner(model, max_pass_tokens=max_pass_tokens)

    def check_features(self, adapter_id: str, features: Sequence[InputFeature]) -> PackedBatch:
        """Check a batch as the verbs would, without running it.

        Raises:
            InvalidFeatures: names the feature, the field and the cure.
            InvalidLossInput: the loss needs what the features do not carry.
        """
        return self._runner.cutter.pack(Purpose(self.adapter(adapter_id), ForwardOptions(), is_training=True), features)

    def run_batch(self, items: Sequence[BatchItem]) -> list[BatchResult | Exception]:
        """Run batches of several adapters in shared passes: each gets the very bits it would get alone.

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
        begun = [self._begin(item) for item in items]
        self._runner.run([run for run in begun if isinstance(run, ItemRun)])
        return [
            run if isinstance(run, Exception) else _finish(run, item) for run, item in zip(begun, items, strict=True)
        ]

    def forward_only(
        self,
        adapter_id: str,
        features: Sequence[InputFeature],
        *,
        options: ForwardOptions | None = None,
        loss: Loss | None = None,
    ) -> BatchResult:
        """Return losses and log-probabilities; changes nothing but the evaluation metrics.

        Where the features lack a stream the loss needs, such as the reference's log-probabilities that
        this call is made for, the loss is 0, no metric counts the batch, and a warning says so.

        Args:
            adapter_id: the adapter.
            features: at least one; only read.
            options: how the pass is run.
            loss: of this batch alone. Unset: the adapter's.

        Raises:
            InvalidFeatures, InvalidLossInput: as `check_features`.
            InvalidArgument: the loss learns values, and the adapter has no head for them.
            LossNotFinite: the model gave no finite loss.
            LossFailed: the loss raised.
            BatchTooLarge: memory ran out.
        """
        item = BatchItem(
            adapter_id=adapter_id, features=features, options=options or ForwardOptions(), is_training=False, loss=loss
        )
        return self._run_alone(item)

    def forward_backward(
        self,
        adapter_id: str,
        features: Sequence[InputFeature],
        *,
        options: ForwardOptions | None = None,
        loss: Loss | None = None,
    ) -> BatchResult:
        """Return losses and log-probabilities, and add the loss's gradient to the accumulated one.

        The batches of one step may have losses of their own. Arguments as of `forward_only`.

        Raises:
            InvalidFeatures, InvalidLossInput, LossNotFinite, LossFailed, BatchTooLarge: as
                `forward_only`, or no label counts; no gradient was added.
        """
        item = BatchItem(
            adapter_id=adapter_id, features=features, options=options or ForwardOptions(), is_training=True, loss=loss
        )
        return self._run_alone(item)

    def forward(
        self, adapter_id: str, features: Sequence[InputFeature], *, options: ForwardOptions | None = None
    ) -> BatchResult:
        """Run a batch in one pass, keep its activations, and return its log-probabilities; the loss is 0 as yet.

        Raises:
            InvalidFeatures, InvalidLossInput, BatchTooLarge: as `forward_backward`.
        """
        purpose = Purpose(self.adapter(adapter_id), options or ForwardOptions(), is_training=True)
        batch = self._runner.cutter.pack(purpose, features)
        _check_trainable(purpose, [batch])
        generator = purpose.state.weights.dropout_generator
        draws = generator.get_state()
        try:
            with torch.enable_grad(), _memory_named(batch):
                outputs = forward_outputs(self.model, [Segment(purpose, batch)])[0]
        except BaseException:
            generator.set_state(draws)
            raise
        purpose.state.pending = PendingForward(batch, outputs)
        result = result_of_pending(purpose.state.pending, purpose.loss, more=purpose.options.more_outputs)
        return forward_result((), [result], metrics=(), warnings=purpose.warnings(features))

    def calculate_loss(self, adapter_id: str) -> BatchResult:
        """Return the loss of the last `forward`.

        Raises:
            AdapterNotReady: there is none.
            LossNotFinite: the model gave no finite loss.
            InvalidLossInput, LossFailed: the loss refused the batch, or raised.
        """
        purpose = Purpose(self.adapter(adapter_id), ForwardOptions(), is_training=True)
        pending = self._pending(purpose.state)
        with torch.enable_grad(), _memory_named(pending.batch):
            pending.output = loss_of(purpose, pending.outputs.loss_batch)
        return forward_result((), [result_of_pending(pending, purpose.loss)], metrics=())

    def backward(
        self, adapter_id: str, *, logprob_gradients: Sequence[npt.NDArray[np.float32]] | None = None
    ) -> BatchResult:
        """Add the gradient of the last `forward` to the accumulated one, and drop its activations.

        Args:
            adapter_id: the adapter.
            logprob_gradients: float32 [T] for each feature: gradient of the caller's own loss by each
                label's log-probability. Unset: the gradient of the last `calculate_loss`.

        Raises:
            AdapterNotReady: there was no forward, or no calculate_loss.
            InvalidFeatures: the given gradients do not fit the batch.
            LossNotFinite: no gradient was added; the activations are gone.
        """
        state = self.adapter(adapter_id)
        pending = self._pending(state)
        if logprob_gradients is not None:
            values, by_outputs = pending.outputs.loss_batch.logps_R, [_logprob_gradient(pending, logprob_gradients)]
        elif pending.output is not None:
            values, by_outputs = pending.output['loss'], None
        else:
            raise AdapterNotReady(adapter_id, 'calculate_loss before backward')
        result = result_of_pending(pending, state.loss)
        state.pending = None
        with _memory_named(pending.batch):
            gradient = gradients_of([state], [values], by_outputs=by_outputs)[0]
        totals = total_gradient(state, gradient)
        answer = forward_result((), [result], metrics=state.train_metrics)
        accumulate(state, totals, divisor=result.output['num_tokens'] if by_outputs is None else 0)
        return answer

    def drop_forward(self, adapter_id: str) -> None:
        """Forget the last `forward` and its activations; nothing happens where there is none."""
        self.adapter(adapter_id).pending = None

    def _run_alone(self, item: BatchItem) -> BatchResult:
        result = self.run_batch([item])[0]
        if isinstance(result, Exception):
            raise result
        return result

    def _begin(self, item: BatchItem) -> ItemRun | Exception:
        """Return the item checked and cut, or why it is refused."""
        try:
            purpose = Purpose(self.adapter(item.adapter_id), item.options, item.is_training, item.loss)
            parts = self._runner.cutter.cut(purpose, item.features)
            if item.is_training:
                _check_trainable(purpose, [part.batch for part in parts])
        except (TrainerError, InvalidFeatures, InvalidLossInput) as error:
            return error
        except LOSS_FAILURES as error:
            refusal = InvalidArgument(f'the batch cannot be packed: {error}')
            refusal.__cause__ = error
            return refusal
        return ItemRun(purpose, parts)

    def _pending(self, state: AdapterState) -> PendingForward:
        if state.pending is None:
            raise AdapterNotReady(state.adapter_id, 'a forward pass')
        return state.pending


def _finish(run: ItemRun, item: BatchItem) -> BatchResult | Exception:
    """Add the gradient, let the metrics take the batch in, and return the result."""
    if run.refusal is not None:
        return run.refusal
    state, totals = run.purpose.state, None
    missing = run.purpose.missing_streams(run.results[0].batch)
    metrics = () if missing else state.metrics(is_training=item.is_training)
    warnings = run.purpose.warnings(item.features, missing=missing)
    try:
        if run.gradient is not None:
            # That of a lone pass was checked with it; sums may overflow.
            totals = total_gradient(state, run.gradient, is_finite=len(run.results) == 1)
        result = forward_result(
            item.features, run.results, metrics=metrics, warnings=warnings, is_divided=run.is_divided
        )
    except (LossNotFinite, MetricFailed) as error:
        run.refuse(error)
        return error
    if totals is not None:
        accumulate(state, totals, divisor=sum(result.output['num_tokens'] for result in run.results))
    return result


def _check_trainable(purpose: Purpose, batches: Sequence[PackedBatch]) -> None:
    """Refuse a batch from which nothing can be learned.

    Raises:
        InvalidArgument: the adapter is disabled.
        InvalidFeatures: no label counts.
    """
    if purpose.options.is_adapter_disabled:
        raise InvalidArgument('is_adapter_disabled is for forward_only; without the adapter nothing is learned')
    if not any(has_loss(purpose, batch) for batch in batches):
        raise InvalidFeatures('have no label that counts: each is masked or weighs 0', field='labels')


def _logprob_gradient(pending: PendingForward, gradients: Sequence[npt.NDArray[np.float32]]) -> torch.Tensor:
    """Return float32 [R] from one array [T] for each feature of a pending forward pass.

    Raises:
        InvalidFeatures: they are not as many, as long, or not finite.
    """
    lengths = pending.batch.feature_lengths
    if len(gradients) != len(lengths):
        raise InvalidFeatures(f'of the last forward were {len(lengths)}, got {len(gradients)} gradients')
    for index, (values, length) in enumerate(zip(gradients, lengths, strict=True)):
        if np.shape(values) != (length,) or not np.isfinite(values).all():
            raise InvalidFeatures(f'must be {length} finite numbers', index=index, field='logprob_gradients')
    return torch.from_numpy(pending.batch.gather(list(gradients))).to(pending.outputs.loss_batch.logps_R.device)


@contextmanager
def _memory_named(batch: PackedBatch) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise BatchTooLarge(batch.token_count, batch.token_count - 1) from error
