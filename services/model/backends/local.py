"""The engine of `twinkle.model` in this process: one model, one thread."""

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from services.kit.server_facts import BaseModelFacts, ServerFacts
from services.kit.worker import SingleWorker
from services.model.backends.choices import configure, training_config_of
from services.model.backends.refusals import engine_errors_as_facts
from services.model.domain import operation as verbs
from services.model.domain import result as results
from services.model.domain.errors import BatchTooLarge
from services.model.domain.training_config import LossChoice, TrainingConfig
from services.model.ports import AdapterDescription, AdapterState, VerbRun
from twinkle.data_format import LoraConfig
from twinkle.hub import resolve_model
from twinkle.loss import LOSSES
from twinkle.metric import METRICS
from twinkle.model.engine import AdapterSnapshot, ForwardOptions, ForwardResult, StepResult, TrainerEngine
from twinkle.module import optimizer_names, scheduler_names
from twinkle.nn import PackedCausalLM
from twinkle.processor import PROCESSORS
from twinkle.template import template_names

_Handler = Callable[[str, Any], results.Outcome]


class LocalBackend:
    """Hosts a `TrainerEngine`; implements `services.model.ports.TrainerBackend`.

    Concurrency: verbs may be awaited from many tasks; the engine runs them one at a time, in the
    order they came. One that has begun is never interrupted.
    """

    def __init__(self, engine: TrainerEngine, facts: ServerFacts, worker: SingleWorker) -> None:
        """Host `engine`, which is to be used in the thread of `worker` alone."""
        self._engine = engine
        self._facts = facts
        self._worker = worker
        self._handlers: dict[type, _Handler] = {
            verbs.ForwardOnly: self._forward_only,
            verbs.Forward: self._forward,
            verbs.CalculateLoss: self._calculate_loss,
            verbs.Backward: self._backward,
            verbs.ForwardBackward: self._forward_backward,
            verbs.ClipGradNorm: self._clip_grad_norm,
            verbs.Step: self._step,
            verbs.ZeroGrad: self._zero_grad,
            verbs.LrStep: self._lr_step,
            verbs.ClipGradAndStep: self._clip_grad_and_step,
            verbs.CalculateMetric: self._calculate_metric,
        }

    @classmethod
    async def load(
        cls,
        base_model: str,
        *,
        dtype: str = 'float32',
        device: str = 'cpu',
        thread_count: int = 0,
        max_batch_tokens: int = 65536,
        max_lora_rank: int = 256,
    ) -> 'LocalBackend':
        """Load a model and its engine.

        Args:
            base_model: hub id, alias or folder; also the name it goes by.
            dtype: of the frozen weights, by torch's name.
            device: torch's name of it.
            thread_count: threads torch may use in this process; 0 leaves it to torch.
            max_batch_tokens: larger batches are refused.
            max_lora_rank: told to callers; the application refuses higher ones.

        Raises:
            ModelNotFound: the id resolves to nothing.
            UnsupportedModel: the architecture cannot be run.
        """
        worker = SingleWorker('trainer')
        engine = await worker.run(_load_engine, base_model, dtype, device, thread_count)
        facts = ServerFacts(
            base_models=[_model_facts(base_model, dtype, engine.model)],
            components=_components(),
            batch_tokens=max_batch_tokens,
            lora_rank=max_lora_rank,
        )
        return cls(engine, facts, worker)

    def facts(self) -> ServerFacts:
        """Return the base model, the components known by name, and limits."""
        return self._facts

    async def create_adapter(
        self, adapter_id: str, lora_config: LoraConfig, training_config: TrainingConfig
    ) -> AdapterDescription:
        """Make an adapter with fresh weights; see the port."""
        return await self._worker.run(self._create, adapter_id, lora_config, training_config)

    async def delete_adapter(self, adapter_id: str) -> None:
        """Free an adapter; see the port."""
        await self._worker.run(self._delete, adapter_id)

    async def run(self, adapter_id: str, verb: verbs.ComputeVerb) -> VerbRun:
        """Carry out a verb; see the port."""
        return await self._worker.run(self._run, adapter_id, verb)

    async def export_state(self, adapter_id: str, *, is_trainer_included: bool) -> AdapterState:
        """Return a copy of the state; see the port."""
        return await self._worker.run(self._export, adapter_id, is_trainer_included=is_trainer_included)

    async def import_state(self, adapter_id: str, state: AdapterState, *, is_trainer_included: bool) -> VerbRun:
        """Replace the state; see the port."""
        return await self._worker.run(self._import, adapter_id, state, is_trainer_included=is_trainer_included)

    async def close(self) -> None:
        """End the thread once the verb that runs is done."""
        self._worker.close()

    # In the worker's thread

    def _create(self, adapter_id: str, lora_config: LoraConfig, training_config: TrainingConfig) -> AdapterDescription:
        with engine_errors_as_facts():
            state = self._engine.create_adapter(adapter_id, lora_config)
            try:
                # The library's own default is the mean; the contract's is the sum.
                if training_config.loss is None:
                    configure(self._engine, adapter_id, TrainingConfig(loss=LossChoice(name='CrossEntropyLoss')))
                configure(self._engine, adapter_id, training_config)
            except BaseException:
                self._engine.delete_adapter(adapter_id)
                raise
        return AdapterDescription(
            lora_config=state.config,
            training_config=training_config_of(state, training_config),
            parameter_count=state.weights.parameter_count,
        )

    def _delete(self, adapter_id: str) -> None:
        if adapter_id in self._engine.adapter_ids:
            self._engine.delete_adapter(adapter_id)

    def _run(self, adapter_id: str, verb: verbs.ComputeVerb) -> VerbRun:
        tokens, limit = verbs.token_count(verb), self._facts.batch_tokens
        if tokens > limit:
            raise BatchTooLarge(token_count=tokens, token_limit=limit)
        begin = time.perf_counter()
        with engine_errors_as_facts(token_count=tokens, token_limit=limit):
            if isinstance(verb, verbs.Configure):
                return self._configure(adapter_id, verb)
            outcome = self._handlers[type(verb)](adapter_id, verb)
        seconds = time.perf_counter() - begin
        return VerbRun(outcome=outcome, device_seconds=seconds, step_count=self._engine.adapter(adapter_id).step_count)

    def _configure(self, adapter_id: str, verb: verbs.Configure) -> VerbRun:
        warnings = configure(self._engine, adapter_id, verb.training_config)
        state = self._engine.adapter(adapter_id)
        config = training_config_of(state, verb.training_config)
        return VerbRun(outcome=None, training_config=config, step_count=state.step_count, warnings=warnings)

    def _export(self, adapter_id: str, *, is_trainer_included: bool) -> AdapterState:
        with engine_errors_as_facts():
            snapshot = self._engine.export_state(adapter_id, is_optimizer_included=is_trainer_included)
        return AdapterState(
            lora_config=snapshot.lora_config,
            adapter=snapshot.adapter,
            trainer=snapshot.trainer or {},
            step_count=snapshot.step_count,
        )

    def _import(self, adapter_id: str, state: AdapterState, *, is_trainer_included: bool) -> VerbRun:
        snapshot = AdapterSnapshot(state.lora_config, state.adapter, state.trainer or None, state.step_count)
        with engine_errors_as_facts():
            self._engine.import_state(adapter_id, snapshot, is_optimizer_included=is_trainer_included)
            adapter = self._engine.adapter(adapter_id)
        config = training_config_of(adapter, TrainingConfig()) if is_trainer_included else None
        return VerbRun(outcome=None, step_count=adapter.step_count, training_config=config)

    def _forward_only(self, adapter_id: str, verb: verbs.ForwardOnly) -> results.Outcome:
        result = self._engine.forward_only(adapter_id, verb.features, options=_options(verb.options))
        return _forward_outcome(result, verb.options)

    def _forward_backward(self, adapter_id: str, verb: verbs.ForwardBackward) -> results.Outcome:
        result = self._engine.forward_backward(adapter_id, verb.features, options=_options(verb.options))
        return _forward_outcome(result, verb.options)

    def _forward(self, adapter_id: str, verb: verbs.Forward) -> results.Outcome:
        result = self._engine.forward(adapter_id, verb.features, options=_options(verb.options))
        return _forward_outcome(result, verb.options)

    def _calculate_loss(self, adapter_id: str, verb: verbs.CalculateLoss) -> results.Outcome:
        return _forward_outcome(self._engine.calculate_loss(adapter_id), None)

    def _backward(self, adapter_id: str, verb: verbs.Backward) -> results.Outcome:
        gradients = verb.logprob_gradients or None
        return _forward_outcome(self._engine.backward(adapter_id, logprob_gradients=gradients), None)

    def _clip_grad_norm(self, adapter_id: str, verb: verbs.ClipGradNorm) -> results.Outcome:
        norm = self._engine.clip_grad_norm(adapter_id, max_grad_norm=verb.max_grad_norm, norm_type=verb.norm_type)
        state = self._engine.adapter(adapter_id)
        return results.StepResult(
            is_applied=norm is not None,
            grad_norm=norm,
            learning_rate=state.learning_rate,
            step_count=state.step_count,
        )

    def _step(self, adapter_id: str, verb: verbs.Step) -> results.Outcome:
        return _step_outcome(self._engine.step(adapter_id, learning_rate=verb.learning_rate))

    def _zero_grad(self, adapter_id: str, verb: verbs.ZeroGrad) -> results.Outcome:
        self._engine.zero_grad(adapter_id)

    def _lr_step(self, adapter_id: str, verb: verbs.LrStep) -> results.Outcome:
        return _step_outcome(self._engine.lr_step(adapter_id))

    def _clip_grad_and_step(self, adapter_id: str, verb: verbs.ClipGradAndStep) -> results.Outcome:
        result = self._engine.clip_grad_and_step(adapter_id, max_grad_norm=verb.max_grad_norm, norm_type=verb.norm_type)
        return _step_outcome(result)

    def _calculate_metric(self, adapter_id: str, verb: verbs.CalculateMetric) -> results.Outcome:
        return results.MetricResult(values=self._engine.calculate_metric(adapter_id, is_training=verb.is_training))


def _load_engine(base_model: str, dtype: str, device: str, thread_count: int) -> TrainerEngine:
    # The log is the service's own; a progress bar would be noise in it.
    disable_progress_bar()
    if thread_count:
        torch.set_num_threads(thread_count)
    return TrainerEngine(PackedCausalLM.load(resolve_model(base_model), dtype=dtype, device=device))


def _model_facts(base_model: str, dtype: str, model: PackedCausalLM) -> BaseModelFacts:
    return BaseModelFacts(
        base_model=base_model,
        context_tokens=model.max_position_embeddings,
        vocabulary_size=model.vocab_size,
        parameter_count=model.parameter_count,
        dtype=dtype,
        is_trainable=True,
    )


def _components() -> dict[str, tuple[str, ...]]:
    return {
        'loss': LOSSES.names,
        'lr_scheduler': scheduler_names(),
        'metric': METRICS.names,
        'optimizer': optimizer_names(),
        'processor': PROCESSORS.names,
        'template': template_names(),
    }


def _options(options: verbs.ForwardOptions) -> ForwardOptions:
    return ForwardOptions(temperature=options.temperature, is_adapter_disabled=options.is_adapter_disabled)


def _forward_outcome(result: ForwardResult, options: verbs.ForwardOptions | None) -> results.ForwardResult:
    is_wanted = options is not None and options.is_logprobs_returned
    return results.ForwardResult(
        loss=result.loss,
        label_count=result.num_tokens,
        logprobs=result.logps if is_wanted else (),
        metrics=result.metrics,
    )


def _step_outcome(result: StepResult) -> results.StepResult:
    return results.StepResult(
        is_applied=result.is_applied,
        grad_norm=result.grad_norm,
        learning_rate=result.learning_rate,
        step_count=result.step_count,
    )
