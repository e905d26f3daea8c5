"""Optimizers, learning-rate schedules, gradient clipping and step health."""

from twinkle.data_format import LayerHealth
from twinkle.module.clipping import GradientNotFinite, clip_by_norm, clip_by_value, gradient_norm
from twinkle.module.health import measure_health
from twinkle.module.optimizer import build_optimizer, optimizer_names
from twinkle.module.optimizer_state import OptimizerState, load_optimizer_state, optimizer_state
from twinkle.module.rehearsal import rehearse_step
from twinkle.module.scheduler import (
    ConstantWarmupScheduler,
    CosineWarmupScheduler,
    LinearWarmupScheduler,
    build_scheduler,
    scheduler_names,
)
from twinkle.module.scheduler_state import load_scheduler_state, scheduler_state, steps_left
from twinkle.module.step_options import step_changes, step_option_names

__all__ = [
    'ConstantWarmupScheduler',
    'CosineWarmupScheduler',
    'GradientNotFinite',
    'LayerHealth',
    'LinearWarmupScheduler',
    'OptimizerState',
    'build_optimizer',
    'build_scheduler',
    'clip_by_norm',
    'clip_by_value',
    'gradient_norm',
    'load_optimizer_state',
    'load_scheduler_state',
    'measure_health',
    'optimizer_names',
    'optimizer_state',
    'rehearse_step',
    'scheduler_names',
    'scheduler_state',
    'step_changes',
    'step_option_names',
    'steps_left',
]
