"""Estimates the cost of training plans with the engine of this process."""

import asyncio
from datetime import timedelta

from services.kit.worker import SingleWorker
from services.model.backends.refusals import engine_errors_as_domain_errors
from services.model.domain.plan import PlanCost, TrainingPlan
from twinkle.model.dry_run import (
    BatchShape,
    CostModel,
    Probe,
    TrainableSize,
    available_bytes,
    full_size,
    lora_size,
)
from twinkle.model.engine import TrainerEngine
from twinkle.nn import select_parameters


class EngineDryRun:
    """Implements `services.model.domain.plan.CostEstimator`.

    The first call measures the model in small steps, so that other work can run in between. Concurrency: for one event
    loop.
    """

    def __init__(self, engine: TrainerEngine, worker: SingleWorker, *, max_pass_tokens: int) -> None:
        """Create the estimator, which uses `engine` only in the thread of `worker`."""
        self._engine = engine
        self._worker = worker
        self._max_pass_tokens = max_pass_tokens
        self._cost_model: CostModel | None = None
        self._measurement_lock = asyncio.Lock()

    async def estimate(self, plan: TrainingPlan) -> PlanCost:
        with engine_errors_as_domain_errors():
            size = self._size(plan)
        async with self._measurement_lock:
            if self._cost_model is None:
                self._cost_model = await self._measure()
        shape = BatchShape(
            batch_size=plan.batch_size, sequence_tokens=plan.sequence_tokens, label_share=plan.label_share
        )
        cost = self._cost_model.estimate(size, shape)
        return PlanCost(
            parameter_count=cost.parameter_count,
            adapter_bytes=cost.adapter_bytes,
            peak_bytes=cost.peak_bytes,
            step_time=timedelta(seconds=cost.step_seconds),
            available_bytes=available_bytes(self._engine.model.device.type),
        )

    async def _measure(self) -> CostModel:
        probe = Probe(self._engine, max_pass_tokens=self._max_pass_tokens)
        while not probe.is_done:
            await self._worker.run(probe.step)
        return probe.cost_model()

    def _size(self, plan: TrainingPlan) -> TrainableSize:
        name, options = plan.optimizer.name, plan.optimizer.options
        if plan.full_parameters is None:
            return lora_size(self._engine.model.targets, plan.lora_config, optimizer=name, options=options)
        chosen = select_parameters(self._engine.model.base_parameters, plan.full_parameters)
        counts = [parameter.numel() for parameter in chosen.values()]
        return full_size(counts, optimizer=name, options=options)
