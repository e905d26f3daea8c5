"""`PassGroup` of the ranks of a `torch.distributed` process group."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from twinkle.model.engine.adapter_state import AdapterState
from twinkle.model.engine.joint_pass import LOSS_FAILURES, PassResult
from twinkle.model.engine.owner import AdapterOwner
from twinkle.model.engine.pass_group import PassOutcome
from twinkle.model.engine.pass_outputs import Segment
from twinkle.model.errors import TrainerError
from twinkle.parallel import all_gather, outcome_of, result_or_raise

_Value = TypeVar('_Value')
_FAILURES = (*LOSS_FAILURES, TrainerError)
"""Exceptions of an owner that all ranks raise."""

_LOCAL_FIELDS = ('batch', 'gradient')
"""Fields of a result that are not pickled: every rank has the batch, and gradients are sent as tensors."""

_Message = Sequence[Mapping[str, Any] | Exception] | None
"""A `PassOutcome` without gradients."""


class TorchPassGroup:
    """Ranks of a process group, which all host the same model and adapters. Implements `PassGroup`.

    Results and refusals are pickled, so all ranks must belong to the same program.

    Args:
        group: process group. None: all ranks of the program; `torch.distributed` must be initialized.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        # Collectives of NCCL need tensors on the device; gloo's may be on the CPU.
        self._device = 'cuda' if dist.get_backend(group) == 'nccl' else 'cpu'

    def exchange(self, mine: PassOutcome, passes: Sequence[Sequence[Segment]]) -> list[PassOutcome]:
        """Send this rank's outcome to all ranks, and return the outcomes of all `passes`.

        Raises:
            CallsDiffer: a rank made a different call.
            RuntimeError: a rank was lost; the group cannot be used any longer.
        """
        names = [[segment.purpose.state.adapter_id for segment in segments] for segments in passes]
        messages: list[_Message] = all_gather(f'ran passes of {names}', _message_of(mine), group=self._group)
        # There may be fewer passes than ranks.
        return [
            self._complete(runner, message, mine, segments)
            for runner, (message, segments) in enumerate(zip(messages, passes, strict=False))
        ]

    def agree(self, error: Exception | None) -> Exception | None:
        """Return the error of the first rank that has an error."""
        errors = all_gather('ended a pass', error, group=self._group)
        return next((item for item in errors if item is not None), None)

    def owner(self, rank: int) -> AdapterOwner | None:
        """Return a rank as the owner of an adapter."""
        return TorchAdapterOwner(self, rank)

    def broadcast(self, tensors: Sequence[Tensor], *, source: int) -> None:
        """Overwrite tensors with the tensors of rank `source`. Every rank must pass equal shapes and dtypes."""
        for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
            alike = [tensor.detach() for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.reshape(-1) for tensor in alike]).to(self._device)
            dist.broadcast(flat, group_src=source, group=self._group)
            if source != self.rank:
                for tensor, part in zip(alike, flat.split([tensor.numel() for tensor in alike]), strict=True):
                    tensor.copy_(part.view(tensor.shape))

    def gather(self, call: str, value: _Value) -> list[_Value]:
        """Return the values of all ranks; see `all_gather`."""
        return all_gather(call, value, group=self._group)

    def _complete(self, runner: int, message: _Message, mine: PassOutcome, segments: Sequence[Segment]) -> PassOutcome:
        """Return the outcome of a pass, with the gradients that its rank sends to the owners of the adapters."""
        if message is None:
            return None
        own = mine if runner == self.rank else None
        outcomes: list[PassResult | Exception] = []
        for index, (item, segment) in enumerate(zip(message, segments, strict=True)):
            if isinstance(item, Exception):
                outcomes.append(item)
                continue
            values = dict(item)
            gradient = None
            if values.pop('has_gradient'):
                result = None if own is None else own[index]
                sent = result.gradient if isinstance(result, PassResult) else None
                gradient = self._deliver(runner, sent, segment.purpose.state)
            outcomes.append(PassResult(batch=segment.batch, gradient=gradient, **values))
        return outcomes

    def _deliver(self, runner: int, mine: Sequence[Tensor] | None, state: AdapterState) -> Sequence[Tensor] | None:
        """Send a gradient from the rank that ran the pass to the adapter's owner.

        If the adapter has no owner, all ranks receive it. The gradient is sent as one float32 tensor of all parameters.
        Returns the gradient on the ranks that have it afterwards, and None on the others.
        """
        target = None if state.owner is None else state.owner.rank
        if target == runner or (target is not None and self.rank not in (runner, target)):
            return mine
        parameters = state.parameters()
        if mine is None:
            flat = torch.empty(sum(parameter.numel() for parameter in parameters), device=self._device)
        else:
            flat = torch.cat([tensor.reshape(-1) for tensor in mine]).to(self._device)
        if target is None:
            dist.broadcast(flat, group_src=runner, group=self._group)
        elif mine is None:
            dist.recv(flat, group_src=runner, group=self._group)
        else:
            dist.send(flat, group_dst=target, group=self._group)
            return None
        parts = flat.split([parameter.numel() for parameter in parameters])
        return [
            part.view(parameter.shape).to(parameter.device) for part, parameter in zip(parts, parameters, strict=True)
        ]


@dataclass(frozen=True)
class TorchAdapterOwner:
    """Rank of a `TorchPassGroup`. Implements `AdapterOwner`."""

    group: TorchPassGroup
    rank: int

    @property
    def is_this_rank(self) -> bool:
        """Whether this process is the owner."""
        return self.rank == self.group.rank

    def run(self, call: str, work: Callable[[], _Value], *, updated: Sequence[Tensor] = ()) -> _Value:
        """Call `work` on the owner, and send its outcome and the updated tensors to the other ranks."""
        outcomes = self.group.gather(call, outcome_of(work, _FAILURES) if self.is_this_rank else None)
        # `gather` has compared the calls; in a broadcast, ranks with different calls would wait for each other.
        self.broadcast(updated)
        return result_or_raise(outcomes[self.rank])

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite the tensors of the other ranks with the owner's tensors."""
        self.group.broadcast(tensors, source=self.rank)


def _message_of(outcome: PassOutcome) -> _Message:
    if outcome is None:
        return None
    return [item if isinstance(item, Exception) else _values_of(item) for item in outcome]


def _values_of(result: PassResult) -> dict[str, Any]:
    values = {field.name: getattr(result, field.name) for field in fields(result) if field.name not in _LOCAL_FIELDS}
    return {**values, 'has_gradient': result.gradient is not None}
