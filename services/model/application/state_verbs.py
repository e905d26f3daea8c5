"""Runs the verbs that need more than the engine: save, load, publish, undo and export.

Each verb can be repeated after a crash: other services recognize a repeated request, and the effect on the engine
becomes valid only when the journal contains the resulting state.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, replace

from twinkle.checkpoint_engine.errors import WeightsOutOfRange
from twinkle.checkpoint_engine.rounding import round_tensors
from twinkle.data_format import StepResult
from twinkle_services.kit.errors import FailedPrecondition, InvalidField, QuotaExceeded
from twinkle_services.model.application.residency import Residency
from twinkle_services.model.domain.adapter import Adapter
from twinkle_services.model.domain.engine import AdapterState, VerbRun
from twinkle_services.model.domain.errors import AdapterNotReady, UndoTooFar
from twinkle_services.model.domain.operation import (
    ClipGradNorm,
    ExportMerged,
    Load,
    Operation,
    PublishVersion,
    Save,
    StateVerb,
    Undo,
    ZeroGrad,
)
from twinkle_services.model.ports import Ports

_NO_LIMIT = 1e30
"""A gradient norm limit that is never reached."""


@dataclass(frozen=True, kw_only=True)
class StateChange:
    """Effects of a state verb."""

    run: VerbRun
    version: int | None = None
    """Newest published version, if the verb published one."""
    state: AdapterState | None = None
    """New state of the adapter, if the verb changed it."""
    undone_from: int | None = None
    """Number of the first operation that an undo reverted."""


class StateVerbRunner:
    """Runs state verbs of adapters that are in the engine."""

    def __init__(self, ports: Ports, residency: Residency) -> None:
        self._ports = ports
        self._backend = ports.backend
        self._residency = residency

    async def __call__(self, adapter: Adapter, operation: Operation, verb: StateVerb) -> StateChange:
        """Run a verb.

        Raises:
            DomainError: The verb failed; the adapter is unchanged, or will be restored to its previous state.
        """
        match verb:
            case Save():
                return await self._save(adapter, verb, request_id=operation.request_id)
            case PublishVersion():
                return await self._publish(adapter, verb)
            case Load():
                return await self._load(adapter, verb)
            case Undo():
                return await self._undo(adapter, verb)
            case ExportMerged():
                return await self._export(adapter, verb)

    async def _save(self, adapter: Adapter, verb: Save, *, request_id: str) -> StateChange:
        if verb.stored_bytes_limit is not None:
            raise QuotaExceeded('stored_bytes', verb.stored_bytes_limit)
        state = await self._backend.export_state(
            adapter.adapter_id,
            is_trainer_included=verb.is_optimizer_included,
            consumed_train_samples=verb.consumed_train_samples,
        )
        saved = await self._ports.store.save(
            adapter.adapter_id, state, base_model=adapter.base_model, save=verb, request_id=request_id
        )
        warnings = tuple(f'{part} is not saved; save with the optimizer to include it' for part in state.left_out)
        return StateChange(run=VerbRun(outcome=saved, warnings=warnings))

    async def _publish(self, adapter: Adapter, verb: PublishVersion) -> StateChange:
        trained = await self._backend.export_state(adapter.adapter_id, is_trainer_included=False)
        state, warnings = await as_published(trained, verb.dtype)
        published = await self._ports.store.publish_version(
            adapter.adapter_id,
            state,
            base_model=adapter.base_model,
            version=adapter.version + 1,
            is_pinned=verb.is_pinned,
        )
        return StateChange(run=VerbRun(outcome=published, warnings=warnings), version=published.version)

    async def _export(self, adapter: Adapter, verb: ExportMerged) -> StateChange:
        state = await self._backend.export_state(adapter.adapter_id, is_trainer_included=False)
        exported = await self._ports.exporter.export_merged(adapter, state, name=verb.name)
        return StateChange(run=VerbRun(outcome=exported))

    async def _load(self, adapter: Adapter, verb: Load) -> StateChange:
        state = await self._ports.store.fetch(verb.checkpoint_path, is_trainer_included=verb.is_optimizer_included)
        check_kind(state, is_full_parameter=adapter.is_full_parameter)
        run = await self._backend.import_state(
            adapter.adapter_id, state, is_trainer_included=verb.is_optimizer_included
        )
        return StateChange(run=run, state=await self._state_after_change(adapter.adapter_id))

    async def _undo(self, adapter: Adapter, verb: Undo) -> StateChange:
        adapter_id = adapter.adapter_id
        steps = await self._ports.journal.applied_steps(adapter_id)
        if verb.step_count > len(steps):
            raise UndoTooFar(adapter_id, verb.step_count, len(steps))
        first = steps[-verb.step_count]
        is_done = False
        try:
            restored = await self._residency.restore(adapter, until=first - 1)
            rate = await self._learning_rate(restored.adapter)
            zeroed = await self._backend.run(adapter_id, ZeroGrad())
            state = await self._state_after_change(adapter_id)
            is_done = True
        finally:
            if not is_done:
                await self._residency.discard(adapter_id)
        before = restored.adapter
        outcome = StepResult(is_applied=True, learning_rate=rate, step_count=before.step_count)
        run = replace(
            zeroed, outcome=outcome, training_config=before.training_config, step_count=before.step_count, warnings=()
        )
        return StateChange(run=run, state=state, undone_from=first)

    async def _learning_rate(self, adapter: Adapter) -> float:
        """Return the schedule's learning rate, which clipping reports. The caller drops the clipped gradient."""
        with suppress(FailedPrecondition):
            outcome = (await self._backend.run(adapter.adapter_id, ClipGradNorm(max_grad_norm=_NO_LIMIT))).outcome
            if isinstance(outcome, StepResult):
                return outcome.learning_rate
        optimizer = adapter.training_config.optimizer
        return 0.0 if optimizer is None else float(optimizer.options.get('lr', 0.0))

    async def _state_after_change(self, adapter_id: str) -> AdapterState:
        state = None
        try:
            state = await self._backend.snapshot(adapter_id)
        finally:
            if state is None:
                # The engine's state cannot be made durable, so the next use restores the adapter from the journal.
                await self._residency.discard(adapter_id)
        if state is None:
            raise AdapterNotReady(adapter_id, 'the Backward of its last Forward')
        return state


def check_kind(state: AdapterState, *, is_full_parameter: bool) -> None:
    """Check that a checkpoint has the weights that the adapter trains, LoRA weights or full model weights.

    Raises:
        InvalidField: The checkpoint has the other kind of weights.
    """
    if state.full_parameters is None and is_full_parameter:
        raise InvalidField('checkpoint_path', 'contains an adapter; choose the checkpoint of a full-parameter run')
    if state.full_parameters is not None and not is_full_parameter:
        raise InvalidField('checkpoint_path', 'contains full model weights; choose the checkpoint of an adapter')


async def as_published(state: AdapterState, dtype: str | None) -> tuple[AdapterState, tuple[str, ...]]:
    """Convert a state to the published dtype; return it with warnings for the caller.

    Args:
        state: The state in the trainer's dtype.
        dtype: Data type to publish; None for the trainer's data type.

    Raises:
        InvalidField: A weight is outside the range of `dtype`.
    """
    if dtype is None:
        return state, ()
    try:
        rounded = await asyncio.to_thread(round_tensors, state.adapter, dtype)
    except WeightsOutOfRange as error:
        raise InvalidField('publish_version.dtype', str(error)) from error
    warnings = tuple(f'weights of {source} were rounded to {dtype}' for source in sorted(rounded.narrowed))
    return replace(state, adapter=rounded.tensors), warnings
