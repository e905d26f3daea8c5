"""Implements the trainer port with an engine that runs in one process or in several."""

import secrets
from collections.abc import Sequence
from dataclasses import replace

from twinkle.data_format import LoraConfig
from twinkle.infra import process_count
from twinkle.model.engine import TrainerEngine
from twinkle_services.kit.errors import DomainError
from twinkle_services.kit.server_facts import ServerFacts
from twinkle_services.kit.worker import SingleWorker
from twinkle_services.model.backends.group.host import EngineHost
from twinkle_services.model.backends.group.loading import LoadOptions, facts_of, load_engine
from twinkle_services.model.backends.group.torchrun_group import TorchrunGroup
from twinkle_services.model.backends.group.worker_group import InProcessGroup, WorkerGroup
from twinkle_services.model.domain.engine import AdapterDescription, AdapterState, BatchPart, UnfinishedVerb, VerbRun
from twinkle_services.model.domain.operation import ComputeVerb
from twinkle_services.model.domain.training_config import TrainingConfig


class GroupBackend:
    """Hosts a `TrainerEngine`; implements `twinkle_services.model.ports.TrainerBackend`.

    Concurrency: methods may be awaited by many tasks. The engine runs their calls one at a time in order of arrival. A
    running call is never interrupted.
    """

    def __init__(self, group: WorkerGroup, engine: TrainerEngine, facts: ServerFacts) -> None:
        self.group = group
        self.engine = engine
        """Engine of this process. Only the engine's thread may call methods; ids and sizes may be read at any time."""
        self._facts = facts

    @classmethod
    async def load(cls, options: LoadOptions) -> 'GroupBackend':
        """Load a model and its engine, in the first process of the program.

        Raises:
            HubError, UnsupportedModel, UnknownComponent, InvalidComponent, PluginRefused, ValueError, NotSupportedYet,
                ImportError: See `load_engine`.
            RuntimeError: Another process of the program was lost.
        """
        worker = SingleWorker('trainer')
        engine = await worker.run(load_engine, options)
        host = EngineHost(engine, options)
        if process_count() == 1:
            group = InProcessGroup(host, worker)
        else:
            group = await worker.run(TorchrunGroup, host, worker, silence_seconds=options.silence_seconds)
        return cls(group, engine, facts_of(options, engine.model))

    def facts(self) -> ServerFacts:
        return self._facts

    async def create_adapter(
        self,
        adapter_id: str,
        lora_config: LoraConfig,
        training_config: TrainingConfig,
        *,
        full_parameters: Sequence[str] | None = None,
    ) -> AdapterDescription:
        if lora_config.seed is None:
            # Without a common seed, the processes would create different weights.
            lora_config = replace(lora_config, seed=secrets.randbelow(1 << 31))
        return await self.group.call(
            EngineHost.create, adapter_id, lora_config, training_config, full_parameters=full_parameters
        )

    async def delete_adapter(self, adapter_id: str) -> None:
        await self.group.call(EngineHost.delete, adapter_id)

    async def run(self, adapter_id: str, verb: ComputeVerb) -> VerbRun:
        return await self.group.call(EngineHost.run, adapter_id, verb)

    async def run_pass(self, parts: Sequence[BatchPart]) -> Sequence[VerbRun | UnfinishedVerb | DomainError]:
        return await self.group.call(EngineHost.run_pass, parts)

    async def abandon(self, adapter_id: str) -> None:
        await self.group.call(EngineHost.abandon, adapter_id)

    async def snapshot(self, adapter_id: str) -> AdapterState | None:
        return await self.group.call(EngineHost.snapshot, adapter_id)

    async def restore_adapter(self, adapter_id: str, state: AdapterState) -> VerbRun:
        return await self.group.call(EngineHost.restore, adapter_id, state)

    async def export_state(
        self, adapter_id: str, *, is_trainer_included: bool, consumed_train_samples: int | None = None
    ) -> AdapterState:
        return await self.group.call(
            EngineHost.export_state,
            adapter_id,
            is_trainer_included=is_trainer_included,
            consumed_train_samples=consumed_train_samples,
        )

    async def import_state(self, adapter_id: str, state: AdapterState, *, is_trainer_included: bool) -> VerbRun:
        return await self.group.call(
            EngineHost.import_state, adapter_id, state, is_trainer_included=is_trainer_included
        )

    async def close(self) -> None:
        """Stop the processes once the running verb is done; verbs in the queue may be cancelled."""
        await self.group.close()
