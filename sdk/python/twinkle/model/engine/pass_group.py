"""Processes that share the passes of a batch: each runs up to one pass at a time, and all receive all outcomes."""

from collections.abc import Sequence
from typing import Protocol

from twinkle.model.engine.joint_pass import PassResult
from twinkle.model.engine.owner import AdapterOwner
from twinkle.model.engine.pass_outputs import Segment

PassOutcome = Sequence[PassResult | Exception] | None
"""Result or refusal of each segment of a pass; None if the pass must be divided, because memory ran out or the backward
pass of several adapters failed."""


class PassGroup(Protocol):
    """Ranks that have equal adapters and run the same batches.

    Every rank plans the same passes and adds the same gradients in the same order. On CPUs, the results of LoRA
    adapters are therefore bitwise equal to the results of one process, for any number of ranks.
    """

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks, which is the maximum number of passes that run concurrently."""
        ...

    def exchange(self, mine: PassOutcome, passes: Sequence[Sequence[Segment]]) -> list[PassOutcome]:
        """Send this rank's outcome to all ranks, and return the outcomes of all `passes`, in order.

        Every rank calls it with equal `passes`, each time after the ranks have run them.

        Args:
            mine: outcome of the pass with the number of this rank; ignored if there is no such pass.
            passes: segments of each pass that the ranks ran concurrently, at most `size` passes.

        Returns:
            Outcomes. Gradients are in float32 on the devices of the parameters. Only the owner of an adapter receives
            its gradient; if the adapter has no owner, all ranks do.

        Raises:
            RuntimeError: a rank was lost; the group cannot be used any longer.
        """
        ...

    def agree(self, error: Exception | None) -> Exception | None:
        """Return the first error in rank order, or None. Every rank calls this after work that all ranks repeat."""
        ...

    def owner(self, rank: int) -> AdapterOwner | None:
        """Return a rank as the owner of an adapter; None if there is one rank, which holds everything."""
        ...


class SoloPassGroup:
    """One process, which runs every pass. Implements `PassGroup`."""

    rank, size = 0, 1

    def exchange(self, mine: PassOutcome, passes: Sequence[Sequence[Segment]]) -> list[PassOutcome]:
        """Return the outcome of the only pass."""
        del passes
        return [mine]

    def agree(self, error: Exception | None) -> Exception | None:
        """Return the error of this process, which is the only rank."""
        return error

    def owner(self, rank: int) -> AdapterOwner | None:
        """Return None, because one process holds everything."""
        del rank
        return None
