"""Converts each verb to an engine call, and the engine's result to a domain result."""

from collections.abc import Callable
from typing import Any

from twinkle.data_format import ForwardResult, StepResult
from twinkle.model.engine import BatchResult, ForwardOptions, StepOptions, TrainerEngine
from twinkle_services.model.domain import operation as verbs
from twinkle_services.model.domain import result as results


def forward_options(options: verbs.ForwardOptions, *, learns_values: bool) -> ForwardOptions:
    """Convert forward options; an adapter with a value head returns values together with log-probabilities."""
    values = ('values',) if learns_values and options.is_logprobs_returned else ()
    return ForwardOptions(
        temperature=options.temperature,
        is_adapter_disabled=options.is_adapter_disabled,
        more_outputs=(*values, 'routed_experts') if options.is_routed_experts_returned else values,
        micro_batch_size=options.micro_batch_size,
    )


def forward_outcome(result: BatchResult, options: verbs.ForwardOptions | None) -> ForwardResult:
    """Return the result to record, with log-probabilities and values only if they were requested."""
    is_requested = options is not None and options.is_logprobs_returned
    experts = result.outputs.get('routed_experts', ())
    return ForwardResult(
        loss=result.loss,
        num_tokens=result.num_tokens,
        logps=result.logps if is_requested else (),
        metrics=result.metrics,
        values=result.values if is_requested else (),
        # Views would keep the experts of the whole pass in memory.
        routed_experts=[own.copy() for own in experts] if experts else (),
    )


def run_forward(
    engine: TrainerEngine, adapter_id: str, verb: verbs.Forward | verbs.CalculateLoss | verbs.Backward
) -> tuple[BatchResult, ForwardResult]:
    """Run a part of a forward and backward pass, and return the engine's result and the result to record."""
    options = None
    match verb:
        case verbs.Forward():
            options = verb.options
            learns_values = engine.adapter(adapter_id).value_head is not None
            chosen = forward_options(options, learns_values=learns_values)
            result = engine.forward(adapter_id, verb.features, options=chosen)
        case verbs.CalculateLoss():
            result = engine.calculate_loss(adapter_id)
        case verbs.Backward():
            result = engine.backward(adapter_id, logprob_gradients=verb.logprob_gradients or None)
    return result, forward_outcome(result, options)


def run_other(engine: TrainerEngine, adapter_id: str, verb: verbs.ComputeVerb) -> results.Outcome:
    """Run a verb that needs no pass through the model."""
    return _HANDLERS[type(verb)](engine, adapter_id, verb)


def _clip_grad_norm(engine: TrainerEngine, adapter_id: str, verb: verbs.ClipGradNorm) -> results.Outcome:
    norm = engine.clip_grad_norm(
        adapter_id,
        max_grad_norm=verb.max_grad_norm,
        norm_type=verb.norm_type,
        max_grad_value=verb.max_grad_value,
    )
    state = engine.adapter(adapter_id)
    return StepResult(
        is_applied=norm is not None, grad_norm=norm, learning_rate=state.learning_rate, step_count=state.step_count
    )


def _step(engine: TrainerEngine, adapter_id: str, verb: verbs.Step) -> results.Outcome:
    return engine.step(
        adapter_id,
        learning_rate=verb.learning_rate,
        optimizer_options=verb.optimizer_options,
        is_health_returned=verb.is_health_returned,
    )


def _zero_grad(engine: TrainerEngine, adapter_id: str, verb: verbs.ZeroGrad) -> results.Outcome:
    del verb
    engine.zero_grad(adapter_id)


def _lr_step(engine: TrainerEngine, adapter_id: str, verb: verbs.LrStep) -> results.Outcome:
    del verb
    return engine.lr_step(adapter_id)


def _clip_grad_and_step(engine: TrainerEngine, adapter_id: str, verb: verbs.ClipGradAndStep) -> results.Outcome:
    return engine.clip_grad_and_step(
        adapter_id,
        max_grad_norm=verb.max_grad_norm,
        norm_type=verb.norm_type,
        max_grad_value=verb.max_grad_value,
        step_options=StepOptions(learning_rate=verb.learning_rate, optimizer_options=verb.optimizer_options),
        is_health_returned=verb.is_health_returned,
    )


def _calculate_metric(engine: TrainerEngine, adapter_id: str, verb: verbs.CalculateMetric) -> results.Outcome:
    return results.MetricResult(values=engine.calculate_metric(adapter_id, is_training=verb.is_training))


_HANDLERS: dict[type, Callable[[TrainerEngine, str, Any], results.Outcome]] = {
    verbs.ClipGradNorm: _clip_grad_norm,
    verbs.Step: _step,
    verbs.ZeroGrad: _zero_grad,
    verbs.LrStep: _lr_step,
    verbs.ClipGradAndStep: _clip_grad_and_step,
    verbs.CalculateMetric: _calculate_metric,
}
