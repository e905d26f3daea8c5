"""Implementation of `twinkle.nn.BaseSharding` for tensor and pipeline parallelism."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from twinkle.parallel.collectives import agreed_errors
from twinkle.parallel.megatron.ranks import MegatronRanks


@dataclass(frozen=True)
class Division:
    """Division of a weight among the `tp` ranks."""

    axis: int
    """Axis along which the weight is divided."""
    count: int
    """Number of different parts; if there are more ranks than parts, consecutive ranks have the same part."""


class ShardedHead(nn.Module):
    """Output head whose rows are divided among the ranks by token ids.

    Args:
        part: rows of this rank, the same number on all ranks.
        size: number of token ids. If the ranks have more rows in total, the additional rows are padding.
        ranks: groups of this rank.
    """

    bias = None
    """Always None: heads with a bias are not supported."""

    def __init__(self, part: nn.Parameter, size: int, ranks: MegatronRanks) -> None:
        super().__init__()
        self._part = part
        self._group = ranks.tensor
        self._whole: Tensor | None = None
        self.in_features, self.out_features = part.shape[1], size

    @property
    def weight(self) -> Tensor:
        """Rows of all token ids in the context `whole`, otherwise the rows of this rank."""
        return self._part if self._whole is None else self._whole

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Gather all rows for the block. Every rank must enter it."""
        self._whole = gathered(self._part.detach(), Division(0, self._group.size()), self._group)[: self.out_features]
        try:
            yield
        finally:
            self._whole = None


class MegatronSharding:
    """Implements `twinkle.nn.BaseSharding`.

    Args:
        head: output head.
        ranks: groups of this rank.
        anchor: input of the first layer of this stage, see `FromPreviousStage`.
        stage_of: returns the pipeline stage of the layer at a path, or None for the output head.
        divided: divisions of the weights that are not whole on every rank.
    """

    needs_every_rank = False
    """Always False: ranks that run different passes are in other groups, and do not wait for this rank in a pass."""

    def __init__(
        self,
        head: ShardedHead,
        ranks: MegatronRanks,
        *,
        anchor: Tensor,
        stage_of: Callable[[str], int | None],
        divided: Mapping[nn.Parameter, Division],
    ) -> None:
        self._head = head
        self._ranks = ranks
        self._stage_of = stage_of
        self._divided = divided
        self.pass_inputs = [] if ranks.pipeline.size() == 1 else [anchor]
        """The anchor, if there are several stages."""

    def whole_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the output head is gathered. Every rank must enter it."""
        return self._head.whole()

    def running_pass(self) -> AbstractContextManager[None]:
        """Return `whole_weights()`. All ranks of a pass compute equal losses, so they agree on the backward pass."""
        return self._head.whole()

    def agree(self, errors: Sequence[Exception | None]) -> list[Exception | None]:
        """Return each adapter's first error in rank order, or None. All ranks of a pass must call this method."""
        return agreed_errors(errors, group=self._ranks.model)

    def gathered(self, parameter: Tensor) -> Tensor:
        """Return the full tensor of a weight of this stage. Every rank must call it."""
        division = self._divided.get(cast('nn.Parameter', parameter))
        own = parameter.detach()
        return own if division is None else gathered(own, division, self._ranks.tensor)

    def complete(self, gradients: Sequence[tuple[str, Tensor]]) -> list[Tensor]:
        """Return the sums of the parts of all `tp` ranks, which the stage of each layer sends to the other stages.

        Gradients of the output head are complete and equal on every rank.
        """
        completed = [gradient for _, gradient in gradients]
        for stage in range(self._ranks.pipeline.size()):
            indexes = [index for index, (path, _) in enumerate(gradients) if self._stage_of(path) == stage]
            if not indexes:
                continue
            flat = torch.cat([completed[index].reshape(-1) for index in indexes])
            if self._ranks.tensor.size() > 1 and self._ranks.pipeline.rank() == stage:
                dist.all_reduce(flat, group=self._ranks.tensor)
            if self._ranks.pipeline.size() > 1:
                dist.broadcast(flat, group_src=stage, group=self._ranks.pipeline)
            parts: Sequence[Tensor] = torch.split(flat, [completed[index].numel() for index in indexes])
            for index, part in zip(indexes, parts, strict=True):
                completed[index] = part.view_as(completed[index])
        return completed


def gathered(part: Tensor, division: Division, group: dist.ProcessGroup) -> Tensor:
    """Return a whole weight from the parts of all ranks. Every rank must call it."""
    if group.size() == 1:
        return part
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts[:: group.size() // division.count], dim=division.axis)
