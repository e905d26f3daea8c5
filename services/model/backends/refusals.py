"""What the engine raises, as facts of the domain."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from services.kit.errors import AdapterNotFound, DomainError, InvalidField, UnknownComponent
from services.model.domain.errors import AdapterNotReady, BatchTooLarge, LossNotFinite
from twinkle import component, loss, nn, processor
from twinkle.model import errors

_ALLOCATOR = 'DefaultCPUAllocator'
"""torch reports memory that ran out on the CPU as a RuntimeError with this name in its message (torch 2.13)."""


@contextmanager
def engine_errors_as_facts(*, token_count: int = 0, token_limit: int = 0) -> Iterator[None]:
    """Raise what the engine refuses as a domain error; defects of ours pass through.

    Args:
        token_count: of the batch that runs, for BatchTooLarge.
        token_limit: of this replica.
    """
    try:
        yield
    except (errors.TrainerError, ValueError) as error:
        fact = _fact(error)
        if fact is None:
            raise
        raise fact from error
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or _ALLOCATOR in str(error):
            raise BatchTooLarge(token_count=token_count, token_limit=token_limit) from error
        raise


def _fact(error: Exception) -> DomainError | None:
    match error:
        case errors.UnknownAdapter():
            return AdapterNotFound(error.adapter_id)
        case errors.AdapterNotReady():
            return AdapterNotReady(error.adapter_id, error.needs)
        case errors.LossNotFinite():
            return LossNotFinite(error.adapter_id, error.feature_index)
        case component.UnknownComponent():
            field = f'training_config.{error.kind}.name'
            return UnknownComponent(field, kind=error.kind, name=error.name, known=error.known)
        case component.InvalidComponentOptions():
            return InvalidField(f'training_config.{error.kind}.options', error.problem)
        case _:
            return _invalid_field(error)


def _invalid_field(error: Exception) -> InvalidField | None:
    match error:
        case processor.InvalidFeatures():
            place = 'features' if error.index is None else f'features[{error.index}]'
            return InvalidField('.'.join(filter(None, (place, error.field))), error.problem)
        case loss.MissingStream():
            return InvalidField(f'features[0].{error.name}', f'must be set: {error.loss} needs it')
        case nn.UnknownTargetModules():
            return InvalidField('lora_config.target_modules', str(error))
        case errors.SnapshotMismatch():
            return InvalidField('checkpoint_path', str(error))
        case errors.InvalidArgument():
            return InvalidField('operation', str(error))
        case _:
            return None
