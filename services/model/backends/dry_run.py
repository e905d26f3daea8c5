"""Estimates the cost of training plans by measuring the engine."""

import asyncio
from datetime import timedelta

from twinkle.model.dry_run import (
    BatchShape,
    CostModel,
    TrainableSize,
    available_bytes,
    full_size,
    lora_size,
)
from twinkle.nn import PackedModel, select_parameters
from twinkle_services.kit.clock import Clock
from twinkle_services.model.backends.group import WorkerGroup
from twinkle_services.model.backends.group.host import EngineHost
from twinkle_services.model.backends.refusals import engine_errors_as_domain_errors
from twinkle_services.model.domain.plan import PlanCost, TrainingPlan

_BUSY_SHARE = 0.1
"""A measurement counts as one under load if other processes used more than this share of the processors' time."""
_REPEAT_SECONDS = 60.0
"""Time after which an estimate repeats a measurement under load."""


class EngineDryRun:
    """Implements `twinkle_services.model.domain.plan.CostEstimator`.

    The first call measures the model in small steps, so that other work can run in between. If other processes used the
    processors meanwhile, a call at least a minute later measures it again.

    Concurrency: use it from one event loop only.
    """

    def __init__(self, group: WorkerGroup, model: PackedModel, *, clock: Clock, process_count: int = 1) -> None:
        """Create the estimator.

        Args:
            group: Processes that host the engine.
            model: Model of the engine; the costs depend on its sizes.
            clock: Determines when a measurement under load is repeated.
            process_count: Number of these processes. On CPUs, they share the host's memory; otherwise, each uses a
                separate GPU.
        """
        self._group = group
        self._model = model
        self._clock = clock
        self._process_count = process_count
        self._cost_model: CostModel | None = None
        self._repeat_time = 0.0
        self._measurement_lock = asyncio.Lock()

    async def estimate(self, plan: TrainingPlan) -> PlanCost:
        with engine_errors_as_domain_errors():
            size = self._size(plan)
        async with self._measurement_lock:
            cost_model = self._cost_model
            if cost_model is None or (self._is_under_load(cost_model) and self._clock.monotonic() >= self._repeat_time):
                cost_model = self._cost_model = await self._measure()
                self._repeat_time = self._clock.monotonic() + _REPEAT_SECONDS
        shape = BatchShape(
            batch_size=plan.batch_size, sequence_tokens=plan.sequence_tokens, label_share=plan.label_share
        )
        cost = cost_model.estimate(size, shape)
        return PlanCost(
            parameter_count=cost.parameter_count,
            adapter_bytes=cost.adapter_bytes,
            peak_bytes=cost.peak_bytes,
            step_time=timedelta(seconds=cost.step_seconds),
            available_bytes=self._available_bytes(),
            is_measured_under_load=self._is_under_load(cost_model),
        )

    def _is_under_load(self, cost_model: CostModel) -> bool:
        """Return whether other processes used the processors; False for several processes, where this is not known."""
        return self._process_count == 1 and cost_model.other_load > _BUSY_SHARE

    def _available_bytes(self) -> int:
        device_type = self._model.device.type
        return available_bytes(device_type) // (1 if device_type == 'cuda' else self._process_count)

    async def _measure(self) -> CostModel:
        while (cost_model := await self._group.call(EngineHost.measure)) is None:
            pass
        return cost_model

    def _size(self, plan: TrainingPlan) -> TrainableSize:
        name, options = plan.optimizer.name, plan.optimizer.options
        if plan.full_parameters is None:
            return lora_size(self._model.targets, plan.lora_config, optimizer=name, options=options)
        chosen = select_parameters(self._model.base_parameters, plan.full_parameters)
        counts = [parameter.numel() for parameter in chosen.values()]
        return full_size(counts, optimizer=name, options=options)
