"""Dry run: the cost of a training run, estimated before the run allocates memory.

`Probe` measures a model once, with small batches and a temporary adapter. The resulting `CostModel` computes the
cost of any adapter and batch without running the model.
"""

from twinkle.model.dry_run.available_memory import available_bytes
from twinkle.model.dry_run.cost_model import BatchShape, CostEstimate, CostModel
from twinkle.model.dry_run.probe import PROBE_COUNT, Probe
from twinkle.model.dry_run.trainable import TrainableSize, full_size, lora_size

__all__ = [
    'PROBE_COUNT',
    'BatchShape',
    'CostEstimate',
    'CostModel',
    'Probe',
    'TrainableSize',
    'available_bytes',
    'full_size',
    'lora_size',
]
