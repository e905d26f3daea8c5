"""Synchronous access to the engine. The methods run in the engine's thread and raise domain errors."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import structlog
import torch

from twinkle.data_format import LoraConfig, TensorData
from twinkle.model.dry_run import CostModel, Probe
from twinkle.model.engine import BatchItem, BatchResult, ItemRun, TrainerEngine
from twinkle.model.engine.memory import OutOfMemoryInShardedPass, is_out_of_memory
from twinkle.model.errors import SnapshotMismatch
from twinkle.nn import PackedModel, tensor_data_of, tensor_of
from twinkle_services.kit.errors import DomainError, Internal
from twinkle_services.model.backends.engine_config import batch_loss, configure, training_config_of
from twinkle_services.model.backends.group.loading import LoadOptions
from twinkle_services.model.backends.group.states import CURSOR, counters_of, snapshot_of, state_of
from twinkle_services.model.backends.group.verbs import forward_options, forward_outcome, run_forward, run_other
from twinkle_services.model.backends.refusals import check_expert_size, domain_error_of, engine_errors_as_domain_errors
from twinkle_services.model.domain import operation as verbs
from twinkle_services.model.domain.engine import AdapterDescription, AdapterState, BatchPart, UnfinishedVerb, VerbRun
from twinkle_services.model.domain.errors import BatchTooLarge
from twinkle_services.model.domain.result import LoadResult
from twinkle_services.model.domain.training_config import LossChoice, TrainingConfig

_log = structlog.get_logger('engine')


@dataclass(frozen=True)
class _Batch:
    """A verb that has begun."""

    verb: verbs.BatchVerb
    run: ItemRun


class EngineHost:
    """Hosts the engine, with synchronous versions of the methods of `twinkle_services.model.ports.TrainerBackend`.

    Concurrency: use it from one thread only.
    """

    def __init__(self, engine: TrainerEngine, options: LoadOptions) -> None:
        self._engine = engine
        self._token_limit = options.batch_tokens
        self._pass_tokens = options.pass_tokens
        self._probe: Probe | None = None
        self._batches: dict[str, _Batch] = {}
        """Verbs that have begun, by adapter."""

    def create(
        self,
        adapter_id: str,
        lora_config: LoraConfig,
        training_config: TrainingConfig,
        *,
        full_parameters: Sequence[str] | None = None,
    ) -> AdapterDescription:
        with self._state_errors():
            if full_parameters is None:
                check_expert_size(self._engine.model.targets, lora_config)
                state = self._engine.create_adapter(adapter_id, lora_config)
            else:
                state = self._engine.create_full_adapter(adapter_id, full_parameters)
            try:
                # The default reduction of the library is the mean, but the default of the API is the sum.
                if training_config.loss is None:
                    configure(self._engine, adapter_id, TrainingConfig(loss=LossChoice(name='CrossEntropyLoss')))
                warnings = configure(self._engine, adapter_id, training_config)
            except BaseException:
                self._engine.delete_adapter(adapter_id)
                raise
        return AdapterDescription(
            lora_config=state.config or lora_config,
            training_config=training_config_of(state, training_config),
            parameter_count=state.weights.parameter_count,
            warnings=warnings,
        )

    def delete(self, adapter_id: str) -> None:
        self.abandon(adapter_id)
        if adapter_id in self._engine.adapter_ids:
            self._engine.delete_adapter(adapter_id)

    def run(self, adapter_id: str, verb: verbs.ComputeVerb) -> VerbRun:
        if isinstance(verb, verbs.BatchVerb):
            (outcome,) = self.run_pass([BatchPart(adapter_id=adapter_id, verb=verb)])
            while isinstance(outcome, UnfinishedVerb):
                (outcome,) = self.run_pass([BatchPart(adapter_id=adapter_id, verb=None)])
            if isinstance(outcome, DomainError):
                raise outcome
            return outcome
        self._check_size(verb)
        with engine_errors_as_domain_errors(token_count=verbs.token_count(verb), token_limit=self._token_limit):
            if isinstance(verb, verbs.Configure):
                return self._configure(adapter_id, verb)
            if isinstance(verb, verbs.Forward | verbs.CalculateLoss | verbs.Backward):
                return self._run_forward(adapter_id, verb)
            begin = time.perf_counter()
            outcome = run_other(self._engine, adapter_id, verb)
            seconds = time.perf_counter() - begin
        step_count = self._engine.adapter(adapter_id).step_count
        return VerbRun(outcome=outcome, device_seconds=seconds, step_count=step_count)

    def run_pass(self, parts: Sequence[BatchPart]) -> list[VerbRun | UnfinishedVerb | DomainError]:
        try:
            refusals = [self._begin(part) for part in parts]
            begun = [part.adapter_id for part, refusal in zip(parts, refusals, strict=True) if refusal is None]
            self._engine.advance([self._batches[adapter_id].run for adapter_id in begun])
            outcomes = {adapter_id: self._outcome_of(adapter_id) for adapter_id in begun}
        except BaseException:
            for part in parts:
                self.abandon(part.adapter_id)
            raise
        return [refusal or outcomes[part.adapter_id] for part, refusal in zip(parts, refusals, strict=True)]

    def abandon(self, adapter_id: str) -> None:
        if batch := self._batches.pop(adapter_id, None):
            self._engine.abandon_batch(batch.run)

    def _begin(self, part: BatchPart) -> DomainError | None:
        """Begin the verb of a part, unless it has begun; return an error if the verb is refused."""
        if part.verb is None:
            return None
        try:
            with engine_errors_as_domain_errors():
                self._check_size(part.verb)
                learns_values = self._engine.adapter(part.adapter_id).value_head is not None
                item = BatchItem(
                    adapter_id=part.adapter_id,
                    features=part.verb.features,
                    options=forward_options(part.verb.options, learns_values=learns_values),
                    is_training=isinstance(part.verb, verbs.ForwardBackward),
                    loss=None if part.verb.loss is None else batch_loss(part.verb.loss),
                )
                run = self._engine.begin_batch(item)
        except DomainError as error:
            return error
        if isinstance(run, Exception):
            return self._error_of(part.adapter_id, part.verb, run)
        self._batches[part.adapter_id] = _Batch(part.verb, run)
        return None

    def _outcome_of(self, adapter_id: str) -> VerbRun | UnfinishedVerb | DomainError:
        """Return the outcome of a verb after a pass."""
        batch = self._batches[adapter_id]
        if not batch.run.is_done:
            return UnfinishedVerb(batch.run.remaining_token_count)
        result = self._engine.finish_batch(batch.run)
        del self._batches[adapter_id]
        if isinstance(result, Exception):
            return self._error_of(adapter_id, batch.verb, result)
        return self._forward_run(adapter_id, result, forward_outcome(result, batch.verb.options))

    def _error_of(self, adapter_id: str, verb: verbs.BatchVerb, error: Exception) -> DomainError:
        """Convert the error that refused a verb."""
        converted = domain_error_of(error, token_count=verbs.token_count(verb), token_limit=self._token_limit)
        if converted is None:
            # Only this adapter's part failed; the other parts are not affected.
            _log.error('operation failed', adapter=adapter_id, exc_info=error)
        return converted or Internal('')

    def _run_forward(self, adapter_id: str, verb: verbs.Forward | verbs.CalculateLoss | verbs.Backward) -> VerbRun:
        begin = time.perf_counter()
        result, outcome = run_forward(self._engine, adapter_id, verb)
        seconds = time.perf_counter() - begin
        return self._forward_run(adapter_id, result, outcome, device_seconds=seconds)

    def _forward_run(
        self, adapter_id: str, result: BatchResult, outcome: object, *, device_seconds: float | None = None
    ) -> VerbRun:
        return VerbRun(
            outcome=outcome,
            device_seconds=result.device_seconds if device_seconds is None else device_seconds,
            padding_token_count=result.padding_token_count,
            pass_count=result.pass_count,
            pass_adapter_count=result.pass_adapter_count,
            shared_token_count=result.shared_token_count,
            step_count=self._engine.adapter(adapter_id).step_count,
            warnings=tuple(result.warnings),
            is_divided=result.is_divided,
        )

    def _configure(self, adapter_id: str, verb: verbs.Configure) -> VerbRun:
        warnings = configure(self._engine, adapter_id, verb.training_config)
        state = self._engine.adapter(adapter_id)
        config = training_config_of(state, verb.training_config)
        return VerbRun(outcome=None, training_config=config, step_count=state.step_count, warnings=warnings)

    def _check_size(self, verb: verbs.ComputeVerb) -> None:
        token_count = verbs.token_count(verb)
        if token_count > self._token_limit:
            raise BatchTooLarge(token_count=token_count, token_limit=self._token_limit)

    def measure(self) -> CostModel | None:
        """Make one of several measurements of the engine; return the cost model after the last one, otherwise None.

        Each measurement takes up to a few seconds; other calls can run in between.

        Raises:
            ReplicaLeased: A full-parameter run uses the engine exclusively.
            BatchTooLarge: Memory ran out.
        """
        self._probe = self._probe or Probe(self._engine, max_pass_tokens=self._pass_tokens)
        with engine_errors_as_domain_errors():
            self._probe.step()
        if not self._probe.is_done:
            return None
        cost_model, self._probe = self._probe.cost_model(), None
        return cost_model

    def snapshot(self, adapter_id: str) -> AdapterState | None:
        with self._state_errors():
            snapshot = self._engine.snapshot(adapter_id)
            return None if snapshot is None else state_of(snapshot)

    def restore(self, adapter_id: str, state: AdapterState) -> VerbRun:
        snapshot = snapshot_of(state)
        with self._state_errors():
            if adapter_id in self._engine.adapter_ids and state.full_parameters is not None:
                # Two full-parameter adapters do not fit in memory, so the old one is deleted first.
                self._engine.delete_adapter(adapter_id)
            elif adapter_id in self._engine.adapter_ids:
                # Test the snapshot first, so that the existing adapter remains if the snapshot is invalid.
                self._engine.restore_adapter(_TEMPORARY_ID, snapshot)
                self._engine.delete_adapter(_TEMPORARY_ID)
                self._engine.delete_adapter(adapter_id)
            restored = self._engine.restore_adapter(adapter_id, snapshot)
        config = training_config_of(restored, TrainingConfig())
        return VerbRun(outcome=None, step_count=restored.step_count, training_config=config)

    def export_state(
        self, adapter_id: str, *, is_trainer_included: bool, consumed_train_samples: int | None = None
    ) -> AdapterState:
        """Copy an adapter's weights and, if requested, its trainer's state.

        For full-parameter training, include the frozen weights, so that samplers can serve the model.
        """
        cursor = {} if consumed_train_samples is None else {CURSOR: consumed_train_samples}
        with self._state_errors():
            state = state_of(self._engine.export_state(adapter_id, is_optimizer_included=is_trainer_included, **cursor))
            if state.full_parameters is None:
                return state
            base = self._engine.model.base_state()
            frozen = {name: tensor_data_of(tensor) for name, tensor in base if name not in state.adapter}
        return replace(state, adapter={**state.adapter, **frozen})

    def import_state(self, adapter_id: str, state: AdapterState, *, is_trainer_included: bool) -> VerbRun:
        with self._state_errors():
            if state.full_parameters is not None:
                # A checkpoint also contains the frozen weights.
                own = self._engine.adapter(adapter_id).weights.peft_state()
                _check_frozen(self._engine.model, {name: state.adapter[name] for name in state.adapter.keys() - own})
                state = replace(state, adapter={name: state.adapter[name] for name in own if name in state.adapter})
            snapshot = snapshot_of(state)
            counters = counters_of(snapshot) if is_trainer_included else {}
            self._engine.import_state(adapter_id, snapshot, is_optimizer_included=is_trainer_included)
            adapter = self._engine.adapter(adapter_id)
        config = training_config_of(adapter, TrainingConfig()) if is_trainer_included else None
        outcome = LoadResult(step_count=adapter.step_count, **counters)
        return VerbRun(outcome=outcome, step_count=adapter.step_count, training_config=config)

    @contextmanager
    def _state_errors(self) -> Iterator[None]:
        """Convert errors of the engine; if memory runs out in a process of a sharded model, end all processes.

        The other processes wait for this one when they gather weights, so this process cannot refuse the call alone.
        """
        with engine_errors_as_domain_errors():
            try:
                yield
            except Exception as error:
                if self._engine.model.sharding is None or not is_out_of_memory(error):
                    raise
                raise OutOfMemoryInShardedPass(f'memory ran out while a state was copied: {error}') from error


_TEMPORARY_ID = 'an adapter that is being restored'
"""Id of a temporary adapter. The ids of other adapters contain no spaces, so this id is unique."""


def _check_frozen(model: PackedModel, saved: Mapping[str, TensorData]) -> None:
    """Refuse a checkpoint if one of the weights that this run does not train differs from the base model.

    Raises:
        SnapshotMismatch: The run that saved the checkpoint trained this weight.
    """
    for name, tensor in model.base_state():
        if name in saved and not torch.equal(tensor.cpu().float(), tensor_of(saved[name]).float()):
            raise SnapshotMismatch(
                f'the checkpoint has a trained weight {name}, which this run does not train; train it, too'
            )
