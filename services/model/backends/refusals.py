"""Converts errors of the engine to domain errors, and refuses adapters that are too large for the engine."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import structlog

from twinkle import component, loss, nn, processor
from twinkle.data_format import LoraConfig
from twinkle.model import errors
from twinkle.model.engine.memory import is_out_of_memory
from twinkle.nn.targets import Layers, expert_counts_of, rank_of, select_layers, trained_shape
from twinkle_services.kit.errors import AdapterNotFound, DomainError, InvalidField, UnknownComponent
from twinkle_services.model.domain.errors import AdapterNotReady, BatchTooLarge, LossNotFinite, ReplicaLeased

_MAX_EXPERT_PARAMETERS = 1 << 30
"""Maximum number of LoRA parameters that an adapter may have in expert layers: 4 GiB as float32."""
_log = structlog.get_logger('refusals')


@contextmanager
def engine_errors_as_domain_errors(*, token_count: int = 0, token_limit: int = 0) -> Iterator[None]:
    """Convert errors of the engine to domain errors; exceptions caused by defects are raised unchanged.

    Args:
        token_count: Number of tokens in the running batch, for BatchTooLarge.
        token_limit: Maximum number of tokens in a batch of this replica.
    """
    try:
        yield
    except DomainError:
        raise
    except Exception as error:
        domain_error = domain_error_of(error, token_count=token_count, token_limit=token_limit)
        if domain_error is None:
            raise
        raise domain_error from error


def domain_error_of(error: Exception, *, token_count: int = 0, token_limit: int = 0) -> DomainError | None:
    """Return the domain error for an error of the engine; None for a defect."""
    if is_out_of_memory(error):
        return BatchTooLarge(token_count=token_count, token_limit=token_limit)
    return next((convert(error) for kind, convert in _CONVERTERS if isinstance(error, kind)), None)


def _unknown_component(error: component.UnknownComponent) -> DomainError:
    field = f'training_config.{error.kind}.name'
    return UnknownComponent(field, kind=error.kind, name=error.name, known=error.known)


def _failed(component_name: str, problem: str) -> DomainError:
    # The message comes from a library or a plugin of this process, so only the operator sees it.
    _log.warning('component failed on a batch', component=component_name, problem=problem)
    return InvalidField('features', f'{component_name} failed on these examples; change its options or the examples')


def _field_path(index: int | None, field: str | None = None) -> str:
    feature = 'features' if index is None else f'features[{index}]'
    return '.'.join(filter(None, (feature, field)))


_CONVERTERS: tuple[tuple[type[Exception], Callable[[Any], DomainError]], ...] = (
    (errors.UnknownAdapter, lambda error: AdapterNotFound(error.adapter_id)),
    (errors.ModelLeased, lambda _: ReplicaLeased()),
    (errors.AdapterNotReady, lambda error: AdapterNotReady(error.adapter_id, error.needs)),
    (errors.LossNotFinite, lambda error: LossNotFinite(error.adapter_id, error.feature_index)),
    (
        errors.BatchTooLarge,
        lambda error: BatchTooLarge(token_count=error.token_count, token_limit=error.token_limit),
    ),
    (component.UnknownComponent, _unknown_component),
    (
        component.InvalidComponentOptions,
        lambda error: InvalidField(f'training_config.{error.kind}.options', error.problem),
    ),
    (processor.InvalidFeatures, lambda error: InvalidField(_field_path(error.index, error.field), error.problem)),
    (
        loss.MissingStream,
        lambda error: InvalidField(_field_path(0, error.name), f'must be set: {error.loss} requires it'),
    ),
    (loss.InvalidLossInput, lambda error: InvalidField(_field_path(error.index), error.problem)),
    (errors.LossFailed, lambda error: _failed(error.loss, error.problem)),
    (errors.MetricFailed, lambda error: _failed(error.metric, error.problem)),
    (nn.ExpertDropout, lambda error: InvalidField('lora_config.lora_dropout', str(error))),
    (nn.UnknownTargetModules, lambda error: InvalidField('lora_config.target_modules', str(error))),
    (nn.UnknownParameters, lambda error: InvalidField('full_parameters.target_modules', str(error))),
    (nn.UnsupportedModel, lambda error: InvalidField('full_parameters', str(error))),
    (errors.SnapshotMismatch, lambda error: InvalidField('checkpoint_path', str(error))),
    (errors.InvalidStepOptions, lambda error: InvalidField('optimizer_options', str(error))),
    (errors.InvalidArgument, lambda error: InvalidField('operation', str(error))),
)
"""Converters of the engine's errors; the first matching class applies."""


def check_expert_size(layers: Layers, config: LoraConfig) -> None:
    """Refuse an adapter with too many LoRA parameters in expert layers, where each expert has separate ones.

    Raises:
        InvalidField: The adapter has too many parameters in expert layers.
        UnknownTargetModules, ExpertDropout: See `select_layers`.
    """
    stacked = [path for path in select_layers(layers, config) if path in expert_counts_of(layers)]
    count = sum(rank_of(path, config) * sum(trained_shape(layers, path)) for path in stacked)
    if count > _MAX_EXPERT_PARAMETERS:
        problem = f'needs {count} parameters for experts, but the limit is {_MAX_EXPERT_PARAMETERS}; lower the rank'
        raise InvalidField('lora_config.lora_rank', problem)
