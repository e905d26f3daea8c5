"""Execution of batches of several adapters in shared passes, with results bitwise equal to running each batch alone.

Passes run in rounds; with several ranks, each rank runs up to one pass at a time. A pass of several adapters is divided
by adapters when memory runs out or its backward pass fails. A pass of one part is halved when memory runs out; this may
change the last bits of the batch's gradient. The smaller passes belong to the same round. A batch with a part that does
not fit in memory and cannot be divided is refused.
"""

from collections.abc import Sequence

from twinkle.model.engine.joint_pass import BackwardFailed, run_joint_pass
from twinkle.model.engine.memory import OutOfMemoryInShardedPass, is_out_of_memory, release_memory
from twinkle.model.engine.parts import BatchCutter
from twinkle.model.engine.pass_group import PassGroup, PassOutcome
from twinkle.model.engine.pass_outputs import Segment
from twinkle.model.engine.rounds import ItemRun, Round
from twinkle.nn import FullWeights, PackedModel


class BatchRunner:
    """Executor of batches on one model.

    Args:
        model: model shared by all adapters.
        max_pass_tokens: maximum number of rows of a shared pass.
        group: ranks that share the passes.
    """

    def __init__(self, model: PackedModel, *, max_pass_tokens: int, group: PassGroup) -> None:
        self._model = model
        self._max_pass_tokens = max_pass_tokens
        self._group = group
        self.cutter = BatchCutter(model, max_pass_tokens=max_pass_tokens)

    def advance(self, runs: Sequence[ItemRun]) -> None:
        """Run one round of the training batches among `runs`, and one round of the forward-only batches.

        `runs` are unfinished batches of different adapters. The `ItemRun` objects store the results. A batch of a
        full-parameter run over sharded weights runs to completion. Gradients are not yet added to the adapters. An
        unexpected exception is raised after all batches were refused; all adapters are then unchanged.
        """
        try:
            for is_training in (True, False):
                alike = [run for run in runs if run.purpose.is_training is is_training]
                weights = alike[0].purpose.state.weights if alike else None
                if is_training and self._model.sharding is not None and isinstance(weights, FullWeights):
                    self._train_shards(alike[0], weights)
                elif alike:
                    self._run_round(alike)
        except BaseException as error:
            for run in runs:
                run.refuse(error)
            raise

    def _train_shards(self, run: ItemRun, weights: FullWeights) -> None:
        """Run a batch of a full-parameter run over sharded weights.

        Raises:
            RuntimeError: a weight received no gradient, which is a bug.
        """
        with weights.collecting() as found:
            while not run.is_done:
                self._run_round([run])
        if run.refusal is None:
            missing = [name for name, gradient in found.items() if gradient is None]
            if missing:
                raise RuntimeError(f'no gradient reached {missing[:3]}')
            run.shards = [gradient for gradient in found.values() if gradient is not None]

    def _run_round(self, runs: Sequence[ItemRun]) -> None:
        work = Round(
            self._model,
            runs,
            cutter=self.cutter,
            max_pass_tokens=self._max_pass_tokens,
            pass_count=self._group.size,
        )
        while passes := work.next_passes(self._group.size):
            segments = [
                [Segment(piece.run.purpose, piece.part.batch, piece.part.tree, piece.dropout) for piece in pieces]
                for pieces in passes
            ]
            rank, mine = self._group.rank, None
            if rank < len(passes):
                mine = self._attempt(segments[rank])
            elif self._model.sharding is not None and self._model.sharding.needs_every_rank:
                # The other ranks wait for this rank in each layer, so this rank repeats one of their passes.
                self._attempt(segments[0], is_repeated=True)
            finished = list(zip(passes, self._group.exchange(mine, segments), strict=True))
            # Iterate from the last pass to the first, because `divide` puts its passes in front of the others.
            for pieces, outcome in reversed(finished):
                if outcome is None:
                    work.divide(pieces)
            for pieces, outcome in finished:
                if outcome is not None:
                    work.finish(pieces, outcome)

    def _attempt(self, segments: Sequence[Segment], *, is_repeated: bool = False) -> PassOutcome:
        """Run a pass; return None if it must run again in smaller passes.

        Raises:
            RuntimeError: the pass failed.
            OutOfMemoryInShardedPass: memory ran out while the model is sharded, so the pass cannot be divided.
        """
        try:
            return run_joint_pass(self._model, segments, is_repeated=is_repeated)
        except BackwardFailed:
            pass
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if self._model.sharding is not None:
                raise OutOfMemoryInShardedPass('memory ran out in a pass; lower max_pass_tokens') from error
        # The memory is released after the except block, because the exception keeps the tensors of the pass alive.
        release_memory(self._model.device)
        return None
