"""`PassGroup` of the ranks of a `torch.distributed` process group."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from twinkle.model.engine.joint_pass import PassResult
from twinkle.model.engine.pass_group import PassOutcome
from twinkle.model.engine.pass_outputs import Segment
from twinkle.parallel import all_gather

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
        """Send this rank's outcome to all ranks, and return the outcomes of all passes.

        Raises:
            RuntimeError: a rank was lost, or made another call; the group cannot be used any longer.
        """
        names = [[segment.purpose.state.adapter_id for segment in segments] for segments in passes]
        messages: list[_Message] = all_gather(f'ran passes of {names}', _message_of(mine), group=self._group)
        # The last round may have fewer passes than ranks.
        return [
            self._complete(owner, message, mine, segments)
            for owner, (message, segments) in enumerate(zip(messages, passes, strict=False))
        ]

    def agree(self, error: Exception | None) -> Exception | None:
        """Return the error of the first rank that has one."""
        errors = all_gather('ended a pass', error, group=self._group)
        return next((item for item in errors if item is not None), None)

    def _complete(self, owner: int, message: _Message, mine: PassOutcome, segments: Sequence[Segment]) -> PassOutcome:
        """Return the outcome of a pass, with the gradients that its owner sends to the other ranks."""
        if message is None:
            return None
        own = mine if owner == self.rank else None
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
                gradient = self._broadcast(owner, sent, segment.purpose.state.parameters())
            outcomes.append(PassResult(batch=segment.batch, gradient=gradient, **values))
        return outcomes

    def _broadcast(self, owner: int, mine: Sequence[Tensor] | None, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Send an adapter's gradient from its owner to all ranks, as one float32 tensor of all its parameters."""
        if mine is None:
            flat = torch.empty(sum(parameter.numel() for parameter in parameters), device=self._device)
        else:
            flat = torch.cat([tensor.reshape(-1) for tensor in mine]).to(self._device)
        dist.broadcast(flat, group_src=owner, group=self._group)
        parts = flat.split([parameter.numel() for parameter in parameters])
        return [
            part.view(parameter.shape).to(parameter.device) for part, parameter in zip(parts, parameters, strict=True)
        ]


def _message_of(outcome: PassOutcome) -> _Message:
    if outcome is None:
        return None
    return [item if isinstance(item, Exception) else _values_of(item) for item in outcome]


def _values_of(result: PassResult) -> dict[str, Any]:
    values = {field.name: getattr(result, field.name) for field in fields(result) if field.name not in _LOCAL_FIELDS}
    return {**values, 'has_gradient': result.gradient is not None}
