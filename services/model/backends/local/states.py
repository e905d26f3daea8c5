"""An adapter's state between the engine and the port."""

from services.model.ports import AdapterState
from twinkle.data_format import LoraConfig
from twinkle.model.engine import AdapterSnapshot


def state_of(snapshot: AdapterSnapshot) -> AdapterState:
    """Return what the engine gave."""
    return AdapterState(
        lora_config=snapshot.lora_config or LoraConfig(),
        full_parameters=snapshot.full_parameters,
        adapter=snapshot.adapter,
        trainer=snapshot.trainer or {},
        step_count=snapshot.step_count,
    )


def snapshot_of(state: AdapterState) -> AdapterSnapshot:
    """Return what the engine takes."""
    lora_config = state.lora_config if state.full_parameters is None else None
    return AdapterSnapshot(
        lora_config, state.adapter, state.trainer or None, state.step_count, full_parameters=state.full_parameters
    )
