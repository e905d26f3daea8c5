"""What the engine raises, as facts of the domain."""

from collections.abc import Iterator
from contextlib import contextmanager

from services.kit.errors import AdapterNotFound, DomainError, InvalidField, UnknownComponent
from services.model.domain.errors import AdapterNotReady, BatchTooLarge, LossNotFinite, ReplicaLeased
from twinkle import component, loss, nn, processor
from twinkle.model import errors
from twinkle.model.engine.memory import is_out_of_memory


@contextmanager
def engine_errors_as_facts(*, token_count: int = 0, token_limit: int = 0) -> Iterator[None]:
    """Raise what the engine refuses as a domain error; defects of ours pass through.

    Args:
        token_count: of the batch that runs, for BatchTooLarge.
        token_limit: of this replica.
    """
    try:
        yield
    except DomainError:
        raise
    except Exception as error:
        fact = domain_error_of(error, token_count=token_count, token_limit=token_limit)
        if fact is None:
            raise
        raise fact from error


def domain_error_of(error: Exception, *, token_count: int = 0, token_limit: int = 0) -> DomainError | None:
    """Return what an error of the engine means to callers; None for a defect of ours."""
    match error:
        case errors.UnknownAdapter():
            return AdapterNotFound(error.adapter_id)
        case errors.ModelLeased():
            return ReplicaLeased()
        case errors.AdapterNotReady():
            return AdapterNotReady(error.adapter_id, error.needs)
        case errors.LossNotFinite():
            return LossNotFinite(error.adapter_id, error.feature_index)
        case errors.BatchTooLarge():
            return BatchTooLarge(token_count=error.token_count, token_limit=error.token_limit)
        case _ if is_out_of_memory(error):
            return BatchTooLarge(token_count=token_count, token_limit=token_limit)
        case _:
            return _component_error(error) or _feature_error(error) or _argument_error(error)


def _component_error(error: Exception) -> DomainError | None:
    match error:
        case component.UnknownComponent():
            field = f'training_config.{error.kind}.name'
            return UnknownComponent(field, kind=error.kind, name=error.name, known=error.known)
        case component.InvalidComponentOptions():
            return InvalidField(f'training_config.{error.kind}.options', error.problem)
        case _:
            return None


def _feature_error(error: Exception) -> InvalidField | None:
    match error:
        case processor.InvalidFeatures():
            return InvalidField(_place(error.index, error.field), error.problem)
        case loss.MissingStream():
            return InvalidField(_place(0, error.name), f'must be set: {error.loss} needs it')
        case loss.InvalidLossInput():
            return InvalidField(_place(error.index, ''), error.problem)
        case errors.LossFailed():
            return InvalidField('features', f'{error.loss} cannot be calculated from them: {error.problem}')
        case _:
            return None


def _argument_error(error: Exception) -> InvalidField | None:
    match error:
        case nn.UnknownTargetModules():
            return InvalidField('lora_config.target_modules', str(error))
        case nn.UnknownParameters():
            return InvalidField('full_parameters.target_modules', str(error))
        case nn.UnsupportedModel():
            return InvalidField('full_parameters', str(error))
        case errors.SnapshotMismatch():
            return InvalidField('checkpoint_path', str(error))
        case errors.InvalidArgument():
            return InvalidField('operation', str(error))
        case _:
            return None


def _place(index: int | None, field: str | None) -> str:
    feature = 'features' if index is None else f'features[{index}]'
    return '.'.join(filter(None, (feature, field)))
