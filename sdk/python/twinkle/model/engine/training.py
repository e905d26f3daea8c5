"""Engine methods that run the model: forward and backward passes of one or several adapters."""

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch

from twinkle.data_format import InputFeature
from twinkle.loss import InvalidLossInput, Loss
from twinkle.model.engine.adapter_state import AdapterState, PendingForward
from twinkle.model.engine.adapters import AdapterTable
from twinkle.model.engine.batch_runner import BatchRunner
from twinkle.model.engine.gradient import accumulate, total_gradient, total_on_owner
from twinkle.model.engine.joint_pass import LOSS_FAILURES, completed_gradients, gradients_of, has_loss, loss_of
from twinkle.model.engine.memory import OutOfMemoryInShardedPass, is_out_of_memory
from twinkle.model.engine.pass_group import PassGroup
from twinkle.model.engine.pass_outputs import Segment, SegmentDropout, forward_outputs
from twinkle.model.engine.purpose import Purpose
from twinkle.model.engine.reports import forward_result, result_of_pending
from twinkle.model.engine.results import BatchItem, BatchResult, ForwardOptions
from twinkle.model.engine.rounds import ItemRun
from twinkle.model.errors import (
    AdapterNotReady,
    BatchTooLarge,
    InvalidArgument,
    LossNotFinite,
    MetricFailed,
    TrainerError,
)
from twinkle.nn import FullWeights, PackedModel
from twinkle.processor import InvalidFeatures, PackedBatch

_Result = TypeVar('_Result')


class Training(AdapterTable):
    """Runs batches and accumulates their gradients.

    Args:
        model: model shared by all adapters.
        max_pass_tokens: maximum number of rows of one pass.
        group: ranks that share the passes of each batch; None for this process alone.
    """

    def __init__(self, model: PackedModel, *, max_pass_tokens: int, group: PassGroup | None = None) -> None:
        super().__init__(model, group=group)
        self._runner = BatchRunner(model, max_pass_tokens=max_pass_tokens, group=self.group)

    def check_features(self, adapter_id: str, features: Sequence[InputFeature]) -> PackedBatch:
        """Validate and pack a batch as a training method would, without running it.

        A batch without a counted label, which training methods refuse, is accepted.

        Raises:
            InvalidFeatures: a feature is invalid, or the features do not form whole groups of the loss.
            InvalidLossInput: the features lack a stream that the loss requires.
            InvalidArgument: the loss needs values, and the adapter has no value head.
        """
        return self._runner.cutter.pack(Purpose(self.adapter(adapter_id), ForwardOptions(), is_training=True), features)

    def run_batch(self, items: Sequence[BatchItem]) -> list[BatchResult | Exception]:
        """Run batches of several adapters in shared passes.

        Results are bitwise equal to passes of single batches, unless memory runs out; see `BatchResult.is_divided`.

        Args:
            items: batches of different adapters.

        Returns:
            For each item, in order, the result or the error that refused it: an exception that `forward_only` or
            `forward_backward` would raise. A refused item changed nothing.

        Raises:
            InvalidArgument: two items have the same adapter.
        """
        if len({item.adapter_id for item in items}) < len(items):
            raise InvalidArgument('items must be of different adapters')
        runs = [self.begin_batch(item) for item in items]
        while unfinished := [run for run in runs if isinstance(run, ItemRun) and not run.is_done]:
            self.advance(unfinished)
        return [run if isinstance(run, Exception) else self.finish_batch(run) for run in runs]

    def begin_batch(self, item: BatchItem) -> ItemRun | Exception:
        """Begin a batch that runs in rounds: call `advance` until it is done, and then `finish_batch`.

        Until then, other methods must not use its adapter; `abandon_batch` ends the batch without a result.

        Returns:
            The validated and divided batch, or the error that refuses it, see `run_batch`.
        """
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
        return ItemRun(purpose, item.features, parts)

    def advance(self, runs: Sequence[ItemRun]) -> None:
        """Run the next pass of each rank, first for the training batches and then for the forward-only batches.

        A pass contains parts of one or more batches that are not done. Batches with the fewest completed parts are
        first, and a batch that does not fit into these passes is not changed. An unexpected exception is raised after
        all batches were refused.
        """
        self._runner.advance(runs)

    def abandon_batch(self, run: ItemRun) -> None:
        """End a batch without a result; the adapter keeps its state from before `begin_batch`."""
        run.refuse(InvalidArgument('the batch was abandoned'))

    def finish_batch(self, run: ItemRun) -> BatchResult | Exception:
        """Accumulate the gradient of a batch that is done, if it is for training, and update the metrics.

        Returns:
            The result, or the error that refused the batch.
        """
        if run.refusal is not None:
            return run.refusal
        state, totals, gradient = run.purpose.state, None, run.gradient
        is_training = run.purpose.is_training
        missing = run.purpose.missing_streams(run.results[0].batch)
        metrics = () if missing else state.metrics(is_training=is_training)
        warnings = run.purpose.warnings(run.features, missing=missing)
        try:
            # The gradient of a single pass was already checked; sums may overflow.
            is_finite = len(run.results) == 1 and run.shards is None
            if is_training and state.owner is not None:
                totals = total_on_owner(state.owner, state, gradient, is_finite=is_finite)
            elif gradient is not None:
                totals = total_gradient(state, gradient, is_finite=is_finite)
            result = forward_result(
                run.features, run.results, metrics=metrics, warnings=warnings, is_divided=run.is_divided
            )
        except (LossNotFinite, MetricFailed) as error:
            run.refuse(error)
            return error
        if is_training:
            accumulate(state, totals, divisor=sum(result.output['num_tokens'] for result in run.results))
        return result

    def forward_only(
        self,
        adapter_id: str,
        features: Sequence[InputFeature],
        *,
        options: ForwardOptions | None = None,
        loss: Loss | None = None,
    ) -> BatchResult:
        """Return losses and log-probabilities; only the evaluation metrics are changed.

        If the features lack a stream that the loss requires, the loss is 0, metrics are not updated, and the result has
        a warning. A call that computes the missing stream, such as reference log-probabilities, can ignore the warning.

        Args:
            adapter_id: id of the adapter.
            features: at least one feature; not modified.
            options: options of the pass.
            loss: loss of this batch only. None uses the adapter's loss.

        Raises:
            InvalidFeatures: see `check_features`.
            InvalidLossInput: the loss refused the batch.
            InvalidArgument: the adapter or the model does not have an output that the loss or the options need, or
                `micro_batch_size` is less than the batch and the loss needs the whole batch in one pass.
            LossNotFinite: the loss is not finite.
            LossFailed, MetricFailed: the loss or a metric raised an exception.
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
        """Return losses and log-probabilities, and accumulate the gradient of the loss.

        Batches of one step may have different losses. For arguments see `forward_only`.

        Raises:
            InvalidFeatures: a feature is invalid, or the batch has no counted label; no gradient was accumulated.
            InvalidLossInput: the features lack a stream that the loss requires, or the loss refused the batch.
            InvalidArgument: see `forward_only`, or `is_adapter_disabled` is set.
            LossNotFinite, LossFailed, MetricFailed, BatchTooLarge: see `forward_only`; no gradient was accumulated.
        """
        item = BatchItem(
            adapter_id=adapter_id, features=features, options=options or ForwardOptions(), is_training=True, loss=loss
        )
        return self._run_alone(item)

    def forward(
        self, adapter_id: str, features: Sequence[InputFeature], *, options: ForwardOptions | None = None
    ) -> BatchResult:
        """Run a batch in one pass, store its activations, and return log-probabilities with a loss of 0.

        Raises:
            InvalidFeatures, InvalidLossInput, BatchTooLarge: see `forward_backward`.
            InvalidArgument: see `forward_backward`, or the weights of a full-parameter run are sharded, or
                `micro_batch_size` is smaller than the batch.
        """
        purpose = Purpose(self.adapter(adapter_id), options or ForwardOptions(), is_training=True)
        if isinstance(purpose.state.weights, FullWeights) and purpose.state.weights.is_sharded:
            raise InvalidArgument(
                'forward of a full-parameter run is not supported with fsdp ranks; use forward_backward'
            )
        if len(features) > (purpose.options.micro_batch_size or len(features)):
            raise InvalidArgument(
                f'forward runs a batch in one pass, so micro_batch_size must be at least {len(features)} or left out'
            )
        part = self._runner.cutter.part(purpose, features)
        batch = part.batch
        _check_trainable(purpose, [batch])
        generator = purpose.state.weights.dropout_generator
        random_state = generator.get_state()
        try:
            with torch.enable_grad():
                dropout = SegmentDropout.sample(purpose, self.model)
                segment = Segment(purpose, batch, part.tree, dropout, is_gradient_given=True)
                outputs = self._run_on_all_ranks(lambda: forward_outputs(self.model, [segment])[0], batch)
        except BaseException:
            generator.set_state(random_state)
            raise
        purpose.state.pending = PendingForward(batch, outputs, batch.token_count - part.tree.row_count)
        result = result_of_pending(purpose.state.pending, purpose.loss, more=purpose.options.more_outputs)
        return forward_result((), [result], metrics=(), warnings=purpose.warnings(features))

    def calculate_loss(self, adapter_id: str) -> BatchResult:
        """Return the loss of the last `forward`.

        Raises:
            AdapterNotReady: there is no pending forward pass.
            LossNotFinite: the loss is not finite.
            InvalidLossInput, LossFailed: the loss refused the batch, or raised another exception.
            BatchTooLarge: memory ran out.
        """
        purpose = Purpose(self.adapter(adapter_id), ForwardOptions(), is_training=True)
        pending = self._pending(purpose.state)
        with torch.enable_grad():
            pending.output = self._run_on_all_ranks(lambda: loss_of(purpose, pending.outputs.loss_batch), pending.batch)
        return forward_result((), [result_of_pending(pending, purpose.loss)], metrics=())

    def backward(
        self, adapter_id: str, *, logprob_gradients: Sequence[npt.NDArray[np.float32]] | None = None
    ) -> BatchResult:
        """Accumulate the gradient of the last `forward`, and discard its activations.

        Args:
            adapter_id: id of the adapter.
            logprob_gradients: float32 [T] for each feature of T tokens: derivative of a custom loss with respect to
                each label's log-probability. None uses the loss of the last `calculate_loss`.

        Raises:
            AdapterNotReady: `forward` was not called; or no gradients are given and `calculate_loss` was not called.
            InvalidFeatures: the given gradients do not match the batch, or are not finite; nothing was changed.
            LossNotFinite: the gradient is not finite and was not accumulated; the activations are discarded.
            BatchTooLarge, MetricFailed: memory ran out, or a metric raised an exception; the gradient was not
                accumulated, and the activations are discarded.
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
        sharding = self.model.sharding
        more_inputs = () if sharding is None else sharding.pass_inputs
        partial = self._run_on_all_ranks(
            lambda: gradients_of([state], [values], by_outputs=by_outputs, more_inputs=more_inputs), pending.batch
        )
        (gradient,) = partial if sharding is None else completed_gradients([state], partial, sharding)
        owner = state.owner
        totals = total_gradient(state, gradient) if owner is None else total_on_owner(owner, state, gradient)
        combined = forward_result((), [result], metrics=state.train_metrics)
        accumulate(state, totals, divisor=result.output['num_tokens'] if by_outputs is None else 0)
        return combined

    def drop_forward(self, adapter_id: str) -> None:
        """Discard the last `forward` and its activations, if there is one."""
        self.adapter(adapter_id).pending = None

    def _run_on_all_ranks(self, work: Callable[[], _Result], batch: PackedBatch) -> _Result:
        """Run a part of a pass that every rank repeats; if memory runs out on a rank, raise an error on all ranks.

        Raises:
            BatchTooLarge: memory ran out on a rank.
            OutOfMemoryInShardedPass: memory ran out while the model is sharded.
        """
        error, result = None, None
        try:
            with self.model.whole_weights():
                result = work()
        except (RuntimeError, MemoryError) as raised:
            if not is_out_of_memory(raised):
                raise
            if self.model.sharding is not None:
                raise OutOfMemoryInShardedPass(f'memory ran out in a pass of {batch.token_count} tokens') from raised
            error = BatchTooLarge(batch.token_count, batch.token_count - 1)
            error.__cause__ = raised
        error = self.group.agree(error)
        if error is not None:
            raise error
        return cast('_Result', result)

    def _run_alone(self, item: BatchItem) -> BatchResult:
        result = self.run_batch([item])[0]
        if isinstance(result, Exception):
            raise result
        return result

    def _pending(self, state: AdapterState) -> PendingForward:
        if state.pending is None:
            raise AdapterNotReady(state.adapter_id, 'a forward pass: call forward')
        return state.pending


def _check_trainable(purpose: Purpose, batches: Sequence[PackedBatch]) -> None:
    """Refuse a batch without anything to learn from.

    Raises:
        InvalidArgument: the adapter is disabled.
        InvalidFeatures: no label counts.
    """
    if purpose.options.is_adapter_disabled:
        raise InvalidArgument('is_adapter_disabled applies only to forward_only; training needs the adapter')
    if not any(has_loss(purpose, batch) for batch in batches):
        raise InvalidFeatures('have no counted label: each is masked or has weight 0', field='labels')


def _logprob_gradient(pending: PendingForward, gradients: Sequence[npt.NDArray[np.float32]]) -> torch.Tensor:
    """Return float32 [R] from one array [T] per feature of a pending forward pass.

    Raises:
        InvalidFeatures: the number or length of the arrays is wrong, or a value is not finite.
    """
    lengths = pending.batch.feature_lengths
    if len(gradients) != len(lengths):
        raise InvalidFeatures(
            f'must match the gradients: the last forward had {len(lengths)} features, got {len(gradients)} gradients'
        )
    for index, (values, length) in enumerate(zip(gradients, lengths, strict=True)):
        if np.shape(values) != (length,) or not np.isfinite(values).all():
            raise InvalidFeatures(f'must be {length} finite numbers', index=index, field='logprob_gradients')
    return torch.from_numpy(pending.batch.gather(list(gradients))).to(pending.outputs.loss_batch.logps_R.device)
