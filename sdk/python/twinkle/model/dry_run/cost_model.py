"""Linear model of the time and memory of training, with terms computed from shapes.

The cost of a pass is a constant plus four terms: per row, per pair of rows of a sequence (attention), per label (the
head), and per row and adapter parameter (LoRA). Five probes with different shapes or LoRA ranks determine the five
coefficients of time and of memory. For memory, the head's term is the number of rows of one block, because the head is
computed block by block.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from twinkle.model.dry_run.trainable import TrainableSize
from twinkle.nn.rows import block_rows

_HEAD_ROWS = block_rows(torch.device('cpu'))
"""Rows per block of the head on the CPU, the device on which the estimates are validated."""

_FULL_BACKWARD = 1.5
"""Cost of a pass with gradients of the base weights, relative to a pass with adapters: three matrix products per layer
(output, input gradient, weight gradient) instead of two."""


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """Shape of the batches of a training run."""

    batch_size: int
    """Number of sequences."""
    sequence_tokens: int
    """Number of tokens per sequence."""
    label_share: float = 1.0
    """Fraction of tokens with a counted label, in (0, 1]."""

    @property
    def terms(self) -> Mapping[str, float]:
        """Value of each term of the batch, without the term of the adapter."""
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
    """Cost of one probe."""

    seconds: float
    peak_bytes: float
    """Peak memory above the level before the probe."""


@dataclass(frozen=True)
class Coefficients:
    """Coefficients of time or memory."""

    by_term: Mapping[str, float]
    """Coefficients of the terms of `BatchShape`."""
    adapted: float
    """Coefficient per row and adapter parameter."""

    def of(self, shape: BatchShape, *, parameter_count: int) -> float:
        """Return the time in seconds, or the memory in bytes, of one pass."""
        terms = shape.terms
        plain = sum(coefficient * terms[name] for name, coefficient in self.by_term.items())
        return plain + self.adapted * terms['rows'] * parameter_count


@dataclass(frozen=True, kw_only=True)
class CostEstimate:
    """Estimated cost of a training run."""

    parameter_count: int
    adapter_bytes: int
    """Memory of weights and optimizer state."""
    peak_bytes: int
    """Peak memory while a batch runs, including `adapter_bytes`, without the base model."""
    step_seconds: float
    """Duration of one forward_backward and step."""
    pass_count: int
    """Number of passes of a batch."""


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Measured costs of a model. Immutable, so it may be stored and used from any thread."""

    time: Coefficients
    memory: Coefficients
    memory_by_parameter: float
    """Bytes of a pass per adapter parameter, for the gradient and its copies."""
    step_seconds_by_parameter: float
    """Seconds of the optimizer step per parameter."""
    max_pass_tokens: int
    other_load: float = 0.0
    """Share of the processors' time, in [0, 1], that other processes used during the measurement. Their use of memory
    and caches makes the measured times longer. 0 if the system does not report it."""

    def estimate(self, size: TrainableSize, shape: BatchShape) -> CostEstimate:
        """Return the cost of training parameters of `size` on batches of `shape`."""
        per_pass = max(1, min(shape.batch_size, self.max_pass_tokens // shape.sequence_tokens))
        passes, rest = divmod(shape.batch_size, per_pass)
        widest = self._part(shape, per_pass)
        seconds = passes * self._seconds(size, widest)
        if rest:
            seconds += self._seconds(size, self._part(shape, rest))
        seconds += self.step_seconds_by_parameter * size.parameter_count
        return CostEstimate(
            parameter_count=size.parameter_count,
            adapter_bytes=size.persistent_bytes,
            peak_bytes=round(size.persistent_bytes + size.gradient_bytes + self._pass_bytes(size, widest)),
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
