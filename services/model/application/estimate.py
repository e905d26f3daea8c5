"""Estimates the cost of a run without allocating its memory."""

from dataclasses import dataclass

from twinkle_services.kit.caller import Caller, require_scope
from twinkle_services.kit.errors import BaseModelNotFound, InvalidField
from twinkle_services.model.domain.errors import BatchTooLarge
from twinkle_services.model.domain.plan import CostEstimator, PlanCost, TrainingPlan
from twinkle_services.model.ports import TrainerBackend


@dataclass(frozen=True, kw_only=True)
class EstimateRequest:
    """Request for an estimate."""

    base_model: str
    plan: TrainingPlan


class Estimate:
    """Estimates costs from measurements of this replica's model."""

    def __init__(self, backend: TrainerBackend, estimator: CostEstimator) -> None:
        self._backend = backend
        self._estimator = estimator

    async def __call__(self, caller: Caller, request: EstimateRequest) -> PlanCost:
        """Return the cost of a plan. The first call takes several seconds, because it measures the model.

        Raises:
            ScopeMissing: The API key lacks the scope `train`.
            BaseModelNotFound: This replica does not serve the base model.
            InvalidField, UnknownComponent, BatchTooLarge: The plan is invalid, or its batch is too large.
            ReplicaLeased: The model cannot be measured while a full-parameter run uses it.
        """
        require_scope(caller, 'train')
        facts = self._backend.facts()
        models = {model.base_model: model for model in facts.base_models}
        model = models.get(request.base_model)
        if model is None:
            raise BaseModelNotFound(request.base_model, tuple(models))
        if request.plan.sequence_tokens > model.context_tokens:
            raise InvalidField(
                'sequence_tokens',
                f'must be at most {model.context_tokens}, the context length of the model, '
                f'got {request.plan.sequence_tokens}',
            )
        token_count = request.plan.batch_size * request.plan.sequence_tokens
        if token_count > facts.batch_tokens > 0:
            raise BatchTooLarge(token_count=token_count, token_limit=facts.batch_tokens)
        return await self._estimator.estimate(request.plan)
