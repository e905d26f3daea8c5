"""Optimizers and learning-rate schedules by name."""

from twinkle.module.optimizer import build_optimizer, optimizer_names
from twinkle.module.scheduler import (
    CosineWarmupScheduler,
    LinearWarmupScheduler,
    build_scheduler,
    scheduler_names,
)

__all__ = [
    'CosineWarmupScheduler',
    'LinearWarmupScheduler',
    'build_optimizer',
    'build_scheduler',
    'optimizer_names',
    'scheduler_names',
]
