"""Trainer for many adapters on one frozen model. Its methods are synchronous and must be called from one thread."""

from twinkle.data_format import ForwardResult, StepResult
from twinkle.model.engine.adapter_state import AdapterState
from twinkle.model.engine.pass_group import PassGroup
from twinkle.model.engine.results import BatchItem, BatchResult, ForwardOptions, StepOptions
from twinkle.model.engine.rounds import ItemRun
from twinkle.model.engine.snapshot import AdapterSnapshot
from twinkle.model.engine.trainer_engine import TrainerEngine

__all__ = [
    'AdapterSnapshot',
    'AdapterState',
    'BatchItem',
    'BatchResult',
    'ForwardOptions',
    'ForwardResult',
    'ItemRun',
    'PassGroup',
    'StepOptions',
    'StepResult',
    'TrainerEngine',
]
