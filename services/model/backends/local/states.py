"""An adapter's state between the engine and the port."""

from typing import Any

from services.model.domain.engine import AdapterState
from twinkle.data_format import LoraConfig
from twinkle.model.engine import AdapterSnapshot
from twinkle.model.engine.snapshot import trainer_state
from twinkle.model.errors import SnapshotMismatch

CURSOR = 'consumed_train_samples'
"""Name of the data cursor among the counters that the engine keeps for its caller."""
_STEPS = 'gradient_accumulation_steps'
_LIMITS = {CURSOR: range(2**63), _STEPS: range(1, 2**31)}


def state_of(snapshot: AdapterSnapshot) -> AdapterState:
    """Return what the engine gave."""
    return AdapterState(
        lora_config=snapshot.lora_config or LoraConfig(),
        full_parameters=snapshot.full_parameters,
        adapter=snapshot.adapter,
        trainer=snapshot.trainer or {},
        step_count=snapshot.step_count,
        left_out=('the value head',) if snapshot.value_head is not None and snapshot.trainer is None else (),
    )


def snapshot_of(state: AdapterState) -> AdapterSnapshot:
    """Return what the engine takes."""
    lora_config = state.lora_config if state.full_parameters is None else None
    return AdapterSnapshot(
        lora_config, state.adapter, state.trainer or None, state.step_count, full_parameters=state.full_parameters
    )


def counters_of(snapshot: AdapterSnapshot) -> dict[str, int]:
    """Return what a checkpoint kept of its run's counters, the data cursor where there is one.

    Raises:
        SnapshotMismatch: there is no trainer's part, or it is malformed.
    """
    numbers = trainer_state(snapshot)
    extra: Any = numbers.get('extra')
    saved = {_STEPS: numbers.get(_STEPS), **({CURSOR: extra[CURSOR]} if CURSOR in (extra or ()) else {})}
    for name, value in saved.items():
        if not isinstance(value, int) or value not in _LIMITS[name]:
            raise SnapshotMismatch(f'{name} of the checkpoint is {value!r}')
    return saved
