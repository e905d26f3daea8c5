"""The dry run: what a training run would cost, before anything of it is allocated.

`Probe` measures a model once, on small batches under a scratch adapter; `CostModel` is what it learned, and
answers for any adapter and batch by arithmetic alone.
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
