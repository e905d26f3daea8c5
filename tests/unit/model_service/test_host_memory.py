"""Exhausted memory while a state is copied: a single process refuses, and the processes of a sharded model end."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from twinkle.data_format import LoraConfig
from twinkle.model.engine import TrainerEngine
from twinkle.model.engine.memory import OutOfMemoryInShardedPass
from twinkle.nn import BaseSharding, PackedCausalLM
from twinkle_services.kit.errors import DomainError
from twinkle_services.model.backends.group.host import EngineHost
from twinkle_services.model.backends.group.loading import LoadOptions
from twinkle_services.model.domain.engine import AdapterState
from twinkle_services.model.domain.training_config import TrainingConfig


class FullEngine(TrainerEngine):
    """Engine without memory for creating, copying or restoring a state while `is_full` is set."""

    is_full = False

    def create_adapter(self, *arguments: Any, **options: Any) -> Any:
        """Create an adapter while there is memory."""
        self._check()
        return super().create_adapter(*arguments, **options)

    def export_state(self, *arguments: Any, **options: Any) -> Any:
        """Copy a state while there is memory."""
        self._check()
        return super().export_state(*arguments, **options)

    def import_state(self, *arguments: Any, **options: Any) -> Any:
        """Restore a state while there is memory."""
        self._check()
        return super().import_state(*arguments, **options)

    def _check(self) -> None:
        if self.is_full:
            # The message that torch's CPU allocator gives; torch has no class for it.
            raise RuntimeError('DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes.')


def create(host: EngineHost, state: AdapterState) -> None:
    """Create an adapter."""
    del state
    host.create('b', LoraConfig(r=2), TrainingConfig())


def copy(host: EngineHost, state: AdapterState) -> None:
    """Copy the state of the adapter."""
    del state
    host.export_state('a', is_trainer_included=True)


def restore(host: EngineHost, state: AdapterState) -> None:
    """Restore the state of the adapter."""
    host.import_state('a', state, is_trainer_included=True)


@pytest.mark.parametrize('work', [create, copy, restore])
def test_exhausted_memory_ends_all_processes_of_a_sharded_model(
    tiny_llama_dir: Path, work: Callable[[EngineHost, AdapterState], None]
) -> None:
    """A process of a sharded model cannot refuse alone, because the others wait for it; a single process refuses."""
    engine = FullEngine(PackedCausalLM.load(tiny_llama_dir))
    host = EngineHost(engine, LoadOptions(base_model=str(tiny_llama_dir)))
    host.create('a', LoraConfig(r=2), TrainingConfig())
    state = host.export_state('a', is_trainer_included=True)
    engine.is_full = True
    with pytest.raises(DomainError):
        work(host, state)
    # The engine fails before it communicates with the other processes.
    engine.model.sharding = cast('BaseSharding', object())
    with pytest.raises(OutOfMemoryInShardedPass):
        work(host, state)
