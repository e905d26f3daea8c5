"""Time and memory of training as a small linear model whose terms are counted from shapes.

A pass of `n` sequences of `t` tokens costs a constant, a part for each row, one for each pair of rows of a
sequence (attention), one for each label (the head), and one for each row and adapter parameter (LoRA). Five
probes that differ in one term each give the five coefficients of time, and the same five those of memory,
where the head counts by the rows of a block, since it is computed block by block.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from twinkle.model.dry_run.trainable import TrainableSize
from twinkle.nn.rows import block_rows

_HEAD_ROWS = block_rows(torch.device('cpu'))
"""Rows of one block of the head on the CPU, for which the estimates are held to what then happens."""

_FULL_BACKWARD = 1.5
"""Passes that also compute the gradient of the base weights: three products a layer (output, input's and
weight's gradient) where the adapters need two."""


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """The batch a run is to be trained on."""

    batch_size: int
    """Sequences."""
    sequence_tokens: int
    """Tokens of each."""
    label_share: float = 1.0
    """Share of the tokens whose label counts, in (0, 1]."""

    @property
    def terms(self) -> Mapping[str, float]:
        """What the batch has of each term, without the adapter's own."""
        rows = self.batch_size * self.sequence_tokens
        return {
            'pass': 1.0,
            'rows': rows,
            'pairs': rows * self.sequence_tokens,
            'labels': rows * self.label_share,
            'head_rows': min(rows * self.label_share, _HEAD_ROWS),
        }


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one probe took."""

    seconds: float
    peak_bytes: float
    """Above what was there before it began."""


@dataclass(frozen=True)
class Coefficients:
    """Of one quantity."""

    by_term: Mapping[str, float]
    """By the terms of `BatchShape`."""
    adapted: float
    """For each row and parameter of the adapter."""

    def of(self, shape: BatchShape, *, parameter_count: int) -> float:
        """Return the quantity for one pass."""
        terms = shape.terms
        plain = sum(coefficient * terms[name] for name, coefficient in self.by_term.items())
        return plain + self.adapted * terms['rows'] * parameter_count


@dataclass(frozen=True, kw_only=True)
class CostEstimate:
    """What a run costs."""

    parameter_count: int
    adapter_bytes: int
    """At rest: weights and the optimizer's state."""
    peak_bytes: int
    """Most while a batch runs, `adapter_bytes` included."""
    step_seconds: float
    """Of one forward_backward and step."""
    pass_count: int


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """What probes of a model have shown. A value: it may be kept, and used from any thread."""

    time: Coefficients
    memory: Coefficients
    memory_by_parameter: float
    """Bytes of a pass for each parameter of the adapter: its gradient and what is made of it."""
    step_seconds_by_parameter: float
    """Of the optimizer."""
    max_pass_tokens: int

    def estimate(self, size: TrainableSize, shape: BatchShape) -> CostEstimate:
        """Return what training `size` on batches of `shape` costs."""
        per_pass = max(1, min(shape.batch_size, self.max_pass_tokens // shape.sequence_tokens))
        passes, rest = divmod(shape.batch_size, per_pass)
        widest = self._part(shape, per_pass)
        seconds = passes * self._seconds(size, widest)
        if rest:
            seconds += self._seconds(size, self._part(shape, rest))
        seconds += self.step_seconds_by_parameter * size.parameter_count
        return CostEstimate(
            parameter_count=size.parameter_count,
            adapter_bytes=size.resting_bytes,
            peak_bytes=round(size.resting_bytes + size.gradient_bytes + self._pass_bytes(size, widest)),
            step_seconds=seconds,
            pass_count=passes + bool(rest),
        )

    def _part(self, shape: BatchShape, batch_size: int) -> BatchShape:
        return BatchShape(batch_size=batch_size, sequence_tokens=shape.sequence_tokens, label_share=shape.label_share)

    def _seconds(self, size: TrainableSize, shape: BatchShape) -> float:
        if size.is_full_parameter:
            return _FULL_BACKWARD * self.time.of(shape, parameter_count=0)
        return self.time.of(shape, parameter_count=size.parameter_count)

    def _pass_bytes(self, size: TrainableSize, shape: BatchShape) -> float:
        adapter = 0 if size.is_full_parameter else size.parameter_count
        return self.memory.of(shape, parameter_count=adapter) + self.memory_by_parameter * size.parameter_count
