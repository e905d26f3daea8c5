"""Measurement of a model on small batches, from which the cost of larger batches is estimated."""

import time

import numpy as np
import torch

from twinkle.data_format import IGNORE_INDEX, InputFeature, LoraConfig
from twinkle.model.dry_run.cost_model import BatchShape, Coefficients, CostModel, Measurement
from twinkle.model.dry_run.live_bytes import peak_bytes
from twinkle.model.dry_run.other_load import ProcessorTimes
from twinkle.model.engine import TrainerEngine

_ADAPTER = '__dry_run__'
"""Id of the temporary adapter."""
_LOW_RANK, _HIGH_RANK = 8, 64
_SHORT = BatchShape(batch_size=1, sequence_tokens=32)
_MANY = BatchShape(batch_size=8, sequence_tokens=32)
_LONG = BatchShape(batch_size=1, sequence_tokens=256)
_FEW_LABELS = BatchShape(batch_size=8, sequence_tokens=32, label_share=0.125)
_PROBES = ((_SHORT, _LOW_RANK), (_MANY, _LOW_RANK), (_LONG, _LOW_RANK), (_FEW_LABELS, _LOW_RANK), (_MANY, _HIGH_RANK))
"""Shape of the batch and LoRA rank of each probe, in the order that `_fitted` requires."""
PROBE_COUNT = len(_PROBES)
"""Number of steps of a `Probe`."""
_REPEATS = 2
"""Number of timings per probe. The minimum is used, because other load on the machine only adds time."""


class Probe:
    """Measurement of one engine in steps, so that other work can run in between.

    Each step creates a temporary adapter and deletes it. Concurrency: call it in the engine's thread.

    Args:
        engine: engine to measure; its adapters are not affected.
        max_pass_tokens: maximum number of tokens per pass of the engine.
    """

    def __init__(self, engine: TrainerEngine, *, max_pass_tokens: int) -> None:
        self._engine = engine
        self._max_pass_tokens = max_pass_tokens
        self._measured: list[Measurement] = []
        self._step_seconds: list[float] = []
        self._parameter_counts: list[int] = []
        self._times = ProcessorTimes(total=0.0, busy=0.0, own=0.0)

    @property
    def is_done(self) -> bool:
        """Whether all measurements were made."""
        return len(self._measured) == PROBE_COUNT

    def step(self) -> None:
        """Make the next measurement, which takes up to a few seconds.

        Raises:
            ModelLeased: a full-parameter adapter has leased the model.
            BatchTooLarge: memory ran out.
        """
        shape, lora_rank = _PROBES[len(self._measured)]
        begin = ProcessorTimes.now()
        adapter = self._engine.create_adapter(_ADAPTER, LoraConfig(r=lora_rank, lora_alpha=lora_rank, seed=0))
        try:
            self._parameter_counts.append(adapter.weights.parameter_count)
            self._measured.append(self._measure(shape))
        finally:
            self._engine.delete_adapter(_ADAPTER)
        self._times += ProcessorTimes.now() - begin

    def cost_model(self) -> CostModel:
        """Return the cost model of the measurements; requires `is_done`."""
        many, high = self._measured[1], self._measured[-1]
        low_count, high_count = self._parameter_counts[0], self._parameter_counts[-1]
        bytes_by_parameter, memory_adapted = _split_by_parameter(
            many.peak_bytes, high.peak_bytes, extra=high_count - low_count
        )
        return CostModel(
            time=_fitted([one.seconds for one in self._measured], self._parameter_counts, label_term='labels'),
            memory=_fitted(
                [
                    one.peak_bytes - bytes_by_parameter * count
                    for one, count in zip(self._measured, self._parameter_counts, strict=True)
                ],
                self._parameter_counts,
                label_term='head_rows',
                adapted=memory_adapted,
            ),
            memory_by_parameter=bytes_by_parameter,
            step_seconds_by_parameter=min(self._step_seconds[:_REPEATS]) / low_count,
            max_pass_tokens=self._max_pass_tokens,
            other_load=self._times.other_share,
        )

    def _measure(self, shape: BatchShape) -> Measurement:
        features = _features(shape, vocab_size=self._engine.model.vocab_size)
        with peak_bytes(self._engine.model.device) as peak:
            self._engine.forward_backward(_ADAPTER, features)
        seconds: list[float] = []
        for _ in range(_REPEATS):
            begin = self._now()
            self._engine.forward_backward(_ADAPTER, features)
            middle = self._now()
            self._engine.step(_ADAPTER)
            self._step_seconds.append(self._now() - middle)
            self._engine.zero_grad(_ADAPTER)
            seconds.append(middle - begin)
        return Measurement(seconds=min(seconds), peak_bytes=peak.value)

    def _now(self) -> float:
        """Return a time in seconds: wall time after the GPU has completed its work, or this thread's CPU time."""
        if self._engine.model.device.type != 'cuda':
            return time.thread_time()
        torch.cuda.synchronize(self._engine.model.device)
        return time.perf_counter()


def _features(shape: BatchShape, *, vocab_size: int) -> list[InputFeature]:
    random = np.random.default_rng(0)
    counting = round(shape.sequence_tokens * shape.label_share)
    features: list[InputFeature] = []
    for _ in range(shape.batch_size):
        ids = random.integers(0, vocab_size, shape.sequence_tokens + 1)
        labels = ids[1:].copy()
        labels[: shape.sequence_tokens - counting] = IGNORE_INDEX
        features.append(InputFeature(input_ids=ids[:-1], labels=labels))
    return features


def _split_by_parameter(low: float, high: float, *, extra: int) -> tuple[float, float]:
    """Split the additional memory of a larger adapter into bytes per parameter and bytes per row and parameter.

    A pass stores at most two float32 numbers (8 bytes) per parameter: the new and the accumulated gradient. The rest of
    the additional memory depends on the rows.
    """
    by_parameter = min(8.0, max(0.0, (high - low) / extra))
    left = max(0.0, high - low - by_parameter * extra)
    return by_parameter, left / (extra * _MANY.terms['rows'])


def _fitted(
    values: list[float], parameter_counts: list[int], *, label_term: str, adapted: float | None = None
) -> Coefficients:
    """Compute each coefficient from two probes that differ in its term; negative results become 0."""
    short, many, long, few, high = values
    rows = _MANY.terms['rows']
    if adapted is None:
        adapted = max(0.0, (high - many) / (rows * (parameter_counts[-1] - parameter_counts[0])))
    labels = max(0.0, (many - few) / (_MANY.terms[label_term] - _FEW_LABELS.terms[label_term]))
    pairs = max(0.0, (long - many) / (_LONG.terms['pairs'] - _MANY.terms['pairs']))

    def without(value: float, shape: BatchShape) -> float:
        terms = shape.terms
        adapter = adapted * terms['rows'] * parameter_counts[0]
        return value - labels * terms[label_term] - pairs * terms['pairs'] - adapter

    low, wide = without(short, _SHORT), without(many, _MANY)
    by_row = max(0.0, (wide - low) / (rows - _SHORT.terms['rows']))
    constant = max(0.0, low - by_row * _SHORT.terms['rows'])
    return Coefficients({'pass': constant, 'rows': by_row, 'pairs': pairs, label_term: labels}, adapted)
