"""Trainer for many adapters on one frozen model and one device. Synchronous; call it from one thread."""

from twinkle.data_format import ForwardResult, StepResult
from twinkle.model.engine.adapter_state import AdapterState
from twinkle.model.engine.results import BatchItem, BatchResult, ForwardOptions, StepOptions
from twinkle.model.engine.snapshot import AdapterSnapshot
from twinkle.model.engine.trainer_engine import TrainerEngine

__all__ = [
    'AdapterSnapshot',
    'AdapterState',
    'BatchItem',
    'BatchResult',
    'ForwardOptions',
    'ForwardResult',
    'StepOptions',
    'StepResult',
    'TrainerEngine',
]
