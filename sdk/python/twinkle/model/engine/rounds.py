"""Batches in progress, and the rounds of passes in which the ranks of a group run them."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from twinkle.data_format import InputFeature
from twinkle.loss import InvalidLossInput
from twinkle.model.engine.gradient import GradientSum, sum_gradients
from twinkle.model.engine.joint_pass import PassResult
from twinkle.model.engine.parts import BatchCutter, Part
from twinkle.model.engine.pass_outputs import SegmentDropout
from twinkle.model.engine.pass_plan import PassPlanner
from twinkle.model.engine.purpose import Purpose
from twinkle.model.errors import BatchTooLarge, LossNotFinite
from twinkle.nn import PackedModel
from twinkle.processor import InvalidFeatures


@dataclass(eq=False)
class Piece:
    """Rows of a batch that run in one pass: a whole part, or one half of a piece that did not fit in memory."""

    run: 'ItemRun'
    part: Part
    dropout: SegmentDropout
    result: PassResult | None = None
    """Result of the pass; None until the piece has run."""


@dataclass(eq=False)
class ItemRun:
    """Execution state of one adapter's batch. Between two rounds, other batches and other calls may run."""

    purpose: Purpose
    features: Sequence[InputFeature]
    parts: Sequence[Part]
    begun_count: int = 0
    """Number of parts that have begun."""
    results: list[PassResult] = field(default_factory=list)
    """Results in the order of the features."""
    refusal: BaseException | None = None
    shards: Sequence[Tensor] | None = None
    """Gradient of a full-parameter run over sharded weights, as shards of this rank; None for all other runs."""

    def __post_init__(self) -> None:
        """Save the random state, which `refuse` restores."""
        self._random_state = self.purpose.state.weights.dropout_generator.get_state()
        # The gradients of a full-parameter adapter are as large as the model.
        self._sum = GradientSum(is_folded=self.purpose.state.config is None)
        self._started: deque[list[Piece]] = deque()
        """Pieces of each part that has begun and is not in `results` yet, in the order of the parts."""

    @property
    def is_done(self) -> bool:
        """Whether all parts have begun, or the batch was refused. No part is unfinished between two rounds."""
        return self.refusal is not None or self.begun_count == len(self.parts)

    @property
    def remaining_token_count(self) -> int:
        """Number of tokens of the features whose parts have not begun."""
        return sum(len(feature['input_ids']) for part in self.parts[self.begun_count :] for feature in part.features)

    @property
    def gradient(self) -> Sequence[Tensor] | None:
        """Sum of the gradients of all parts.

        None without training or a loss, after a refusal, and on ranks that do not own the adapter.
        """
        if self.refusal is not None:
            return None
        return self._sum.total() if self.shards is None else self.shards

    @property
    def is_divided(self) -> bool:
        """Whether a part ran in several pieces."""
        return len(self.results) > len(self.parts)

    def begin_part(self, model: PackedModel) -> Piece:
        """Begin the next part.

        Dropout is sampled here, so the adapter's random state does not depend on the rank that runs the part.
        """
        piece = Piece(self, self.parts[self.begun_count], SegmentDropout.sample(self.purpose, model))
        self.begun_count += 1
        self._started.append([piece])
        return piece

    def divide(self, piece: Piece, halves: Sequence[Piece]) -> None:
        """Replace a piece by its halves."""
        pieces = next(pieces for pieces in self._started if piece in pieces)
        index = pieces.index(piece)
        pieces[index : index + 1] = halves

    def take(self, piece: Piece, result: PassResult) -> None:
        """Store the result of a piece, and add the gradients of the parts that are complete, in the order of the parts.

        Pieces of one batch may end in any order.
        """
        piece.result = result
        while self._started:
            gradient: Sequence[Tensor] | None = None
            done: list[PassResult] = []
            for other in self._started[0]:
                if other.result is None:
                    return
                gradient = sum_gradients(gradient, other.result.gradient)
                done.append(replace(other.result, gradient=None))
            self._started.popleft()
            self.results += done
            self._sum.add(gradient)

    def refuse(self, error: BaseException) -> None:
        """Abort the batch with an error and restore the adapter's random state."""
        self.refusal, self._sum = error, GradientSum()
        self._started.clear()
        self.purpose.state.weights.dropout_generator.set_state(self._random_state)


class Round:
    """Passes that the ranks run next: up to one for each rank, and the smaller passes into which some were divided.

    Every rank of a group plans the same round.

    Args:
        model: model of the batches; it determines whether an adapter has dropout at the output head.
        runs: unfinished batches of different adapters, all for training or none.
        cutter: divides parts that do not fit in memory.
        max_pass_tokens: maximum number of rows of a shared pass.
        pass_count: maximum number of passes of the round before any is divided.
    """

    def __init__(
        self,
        model: PackedModel,
        runs: Sequence[ItemRun],
        *,
        cutter: BatchCutter,
        max_pass_tokens: int,
        pass_count: int,
    ) -> None:
        self._cutter = cutter
        self._passes: deque[Sequence[Piece]] = deque()
        planner = PassPlanner(max_rows=max_pass_tokens)
        for item, run in enumerate(runs):
            planner.add(item, [part.planned_rows for part in run.parts], next_part=run.begun_count)
        for _ in range(pass_count):
            if slots := planner.next_pass():
                self._passes.append([runs[slot.item].begin_part(model) for slot in slots])

    def next_passes(self, count: int) -> list[list[Piece]]:
        """Remove up to `count` passes and return them, without pieces of refused batches; empty if no pass is left."""
        passes: list[list[Piece]] = []
        while self._passes and len(passes) < count:
            if pieces := [piece for piece in self._passes.popleft() if piece.run.refusal is None]:
                passes.append(pieces)
        return passes

    def finish(self, pieces: Sequence[Piece], outcomes: Sequence[PassResult | Exception]) -> None:
        """Store the outcomes of a pass. The remaining parts of a refused batch are dropped."""
        for piece, outcome in zip(pieces, outcomes, strict=True):
            if piece.run.refusal is not None:
                continue
            if isinstance(outcome, Exception):
                piece.run.refuse(_with_batch_index(outcome, piece))
            else:
                piece.run.take(piece, outcome)

    def divide(self, pieces: Sequence[Piece]) -> None:
        """Replace a pass with two smaller passes; refuse the batch of a piece that cannot be divided."""
        if len(pieces) > 1:
            middle = len(pieces) // 2
            self._passes.extendleft([pieces[middle:], pieces[:middle]])
            return
        (piece,) = pieces
        if piece.run.refusal is not None:
            return
        halves = [
            Piece(piece.run, half, piece.dropout.of_half(index))
            for index, half in enumerate(self._cutter.halve(piece.run.purpose, piece.part))
        ]
        if halves:
            piece.run.divide(piece, halves)
            self._passes.extendleft([half] for half in reversed(halves))
        else:
            token_count = piece.part.batch.token_count
            piece.run.refuse(BatchTooLarge(token_count, token_count - 1))


def _with_batch_index(error: Exception, piece: Piece) -> Exception:
    """Return the error with the feature's index in the batch instead of its index in the part."""
    begin = piece.part.first_feature
    match error:
        case LossNotFinite(feature_index=int(index)):
            return LossNotFinite(error.adapter_id, index + begin)
        case InvalidFeatures(index=int(index)):
            return InvalidFeatures(error.problem, index=index + begin, field=error.field)
        case InvalidLossInput(index=int(index)):
            return InvalidLossInput(error.problem, index=index + begin)
        case _:
            return error
