"""Execution of batches of several adapters in shared passes, bitwise equal to running each alone.

When memory runs out, a pass is split by adapters; a single part that does not fit is halved; a part that cannot be
divided is refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from twinkle.loss import InvalidLossInput
from twinkle.model.engine.gradient import sum_gradients
from twinkle.model.engine.joint_pass import BackwardFailed, PassResult, run_joint_pass
from twinkle.model.engine.memory import is_out_of_memory, release_memory
from twinkle.model.engine.parts import BatchCutter, Part
from twinkle.model.engine.pass_outputs import Segment
from twinkle.model.engine.pass_plan import PassPlanner, Slot
from twinkle.model.engine.purpose import Purpose
from twinkle.model.errors import BatchTooLarge, LossNotFinite
from twinkle.nn import PackedCausalLM
from twinkle.processor import InvalidFeatures

_Outcome = list[PassResult] | Exception
"""Result of one part: one `PassResult` per piece, or the error that refused the part."""


@dataclass
class ItemRun:
    """Execution state of one adapter's batch."""

    purpose: Purpose
    parts: Sequence[Part]
    results: list[PassResult] = field(default_factory=list)
    """Results in the order of the features."""
    gradient: Sequence[Tensor] | None = None
    """Sum of the gradients of completed parts, in their order."""
    refusal: BaseException | None = None

    def __post_init__(self) -> None:
        """Save the random state, which `refuse` restores."""
        self._random_state = self.purpose.state.weights.dropout_generator.get_state()

    def refuse(self, error: BaseException) -> None:
        """Abort the batch with an error and restore the adapter's random state."""
        self.refusal, self.gradient = error, None
        self.purpose.state.weights.dropout_generator.set_state(self._random_state)

    @property
    def is_divided(self) -> bool:
        """Whether a part ran in several pieces."""
        return len(self.results) > len(self.parts)

    def take(self, outcome: _Outcome) -> None:
        """Add the result of the next part."""
        if isinstance(outcome, Exception):
            self.refuse(outcome)
            return
        for result in outcome:
            if result.gradient is not None:
                self.gradient = sum_gradients(self.gradient, result.gradient)
        self.results += [replace(result, gradient=None) for result in outcome]


class BatchRunner:
    """Executor of batches on one model.

    Args:
        model: model shared by all adapters.
        max_pass_tokens: maximum number of rows of a shared pass.
    """

    def __init__(self, model: PackedCausalLM, *, max_pass_tokens: int) -> None:
        self._model = model
        self._max_pass_tokens = max_pass_tokens
        self.cutter = BatchCutter(model, max_pass_tokens=max_pass_tokens)

    def run(self, runs: Sequence[ItemRun]) -> None:
        """Run batches of different adapters to completion; each `ItemRun` gets its result.

        Gradients are not yet added to the adapters. An unexpected exception leaves all adapters unchanged.
        """
        try:
            self._run_kinds(runs)
        except BaseException as error:
            for run in runs:
                run.refuse(error)
            raise

    def _run_kinds(self, runs: Sequence[ItemRun]) -> None:
        for is_training in (True, False):
            self._run_alike([run for run in runs if run.purpose.is_training is is_training])

    def _run_alike(self, runs: Sequence[ItemRun]) -> None:
        planner = PassPlanner(max_tokens=self._max_pass_tokens)
        for index, run in enumerate(runs):
            planner.add(index, [part.batch.token_count for part in run.parts])
        while slots := planner.next_pass():
            outcomes = self._run_pass([_Piece.of(runs, slot) for slot in slots])
            for slot, outcome in zip(slots, outcomes, strict=True):
                runs[slot.item].take(outcome)
                if isinstance(outcome, Exception):
                    planner.drop(slot.item)

    def _run_pass(self, pieces: 'Sequence[_Piece]') -> list[_Outcome]:
        random_states = [piece.run.purpose.state.weights.dropout_generator.get_state() for piece in pieces]
        results = self._attempt(pieces)
        if results is not None:
            return [
                _with_batch_index(result, piece) if isinstance(result, Exception) else [result]
                for result, piece in zip(results, pieces, strict=True)
            ]
        for piece, random_state in zip(pieces, random_states, strict=True):
            piece.run.purpose.state.weights.dropout_generator.set_state(random_state)
        release_memory(self._model.device)
        if len(pieces) == 1:
            return [self._run_halved(pieces[0])]
        middle = len(pieces) // 2
        first = self._run_pass(pieces[:middle])
        return first + self._run_pass(pieces[middle:])

    def _attempt(self, pieces: 'Sequence[_Piece]') -> list[PassResult | Exception] | None:
        """Run a pass; return None if it must run again in smaller passes."""
        segments = [piece.segment for piece in pieces]
        try:
            return list(run_joint_pass(self._model, segments))
        except BackwardFailed:
            return None
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None

    def _run_halved(self, piece: '_Piece') -> _Outcome:
        halves = self.cutter.halve(piece.run.purpose, piece.part)
        token_count = piece.part.batch.token_count
        if not halves:
            return BatchTooLarge(token_count, min(self._max_pass_tokens, token_count - 1))
        results: list[PassResult] = []
        for half in halves:
            outcome = self._run_pass([_Piece(piece.run, half)])[0]
            if isinstance(outcome, Exception):
                return outcome
            results += outcome
        return results


@dataclass(frozen=True)
class _Piece:
    """A part of an item, or a piece of a part."""

    run: ItemRun
    part: Part

    @property
    def segment(self) -> Segment:
        """Input of a pass."""
        return Segment(self.run.purpose, self.part.batch)

    @classmethod
    def of(cls, runs: Sequence[ItemRun], slot: Slot) -> '_Piece':
        """Return the part of a slot."""
        return cls(runs[slot.item], runs[slot.item].parts[slot.part])


def _with_batch_index(error: Exception, piece: _Piece) -> Exception:
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
