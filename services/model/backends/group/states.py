"""Converts adapter states between the engine and the port."""

from typing import Any

from twinkle.data_format import LoraConfig
from twinkle.model.engine import AdapterSnapshot
from twinkle.model.engine.snapshot import gathered_snapshot, trainer_state
from twinkle.model.errors import SnapshotMismatch
from twinkle_services.model.domain.engine import AdapterState

CURSOR = 'consumed_train_samples'
"""Name of the data cursor, a counter that the engine stores for its caller."""
_STEPS = 'gradient_accumulation_steps'
_LIMITS = {CURSOR: range(2**63), _STEPS: range(1, 2**31)}
"""Allowed values of the saved counters, by name."""


def state_of(snapshot: AdapterSnapshot) -> AdapterState:
    """Convert a snapshot of the engine to a state of the port.

    Collective: if FSDP divides the tensors of the snapshot among processes, every process must call this function.
    """
    if snapshot.full_parameters is not None:
        snapshot = gathered_snapshot(snapshot)
    return AdapterState(
        lora_config=snapshot.lora_config or LoraConfig(),
        full_parameters=snapshot.full_parameters,
        adapter=snapshot.adapter,
        trainer=snapshot.trainer or {},
        step_count=snapshot.step_count,
        left_out=('the value head',) if snapshot.value_head is not None and snapshot.trainer is None else (),
    )


def snapshot_of(state: AdapterState) -> AdapterSnapshot:
    """Convert a state of the port to a snapshot of the engine."""
    lora_config = state.lora_config if state.full_parameters is None else None
    return AdapterSnapshot(
        lora_config, state.adapter, state.trainer or None, state.step_count, full_parameters=state.full_parameters
    )


def counters_of(snapshot: AdapterSnapshot) -> dict[str, int]:
    """Return the counters saved in a checkpoint, including the data cursor if it was saved.

    Raises:
        SnapshotMismatch: The trainer's state is missing or malformed.
    """
    numbers = trainer_state(snapshot)
    extra: Any = numbers.get('extra')
    saved = {_STEPS: numbers.get(_STEPS), **({CURSOR: extra[CURSOR]} if CURSOR in (extra or ()) else {})}
    for name, value in saved.items():
        if not isinstance(value, int) or value not in _LIMITS[name]:
            raise SnapshotMismatch(f'{name} of the checkpoint is {value!r}, which is invalid; load only its weights')
    return saved
