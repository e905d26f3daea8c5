"""The component library's errors as facts about the request."""

from collections.abc import Generator
from contextlib import contextmanager

from services.data.domain import DatasetNotFound, DatasetNotReady, FilterStep, MapStep, Step, TemplateStep
from services.kit.errors import BaseModelNotFound, InvalidField, ServiceUnreachable, UnknownComponent
from twinkle.dataset import DatasetError, InvalidExample, NotReady, UnreadableFile
from twinkle.hub import HubError, HubUnreachable
from twinkle.preprocessor import (
    InvalidArguments,
    InvalidRow,
    PreprocessorError,
    UnknownPreprocessor,
    filter_names,
    preprocessor_names,
)
from twinkle.template import TemplateError, UnknownTemplate, template_names


@contextmanager
def facts_of_source(field: str, *, dataset_id: str = '') -> Generator[None]:
    """Turn the library's errors about where rows come from into facts.

    Raises:
        DatasetNotFound, ServiceUnreachable, InvalidField: what they mean.
    """
    try:
        yield
    except HubUnreachable as error:
        raise ServiceUnreachable('hub') from error
    except HubError as error:
        raise DatasetNotFound(dataset_id) from error
    except (UnreadableFile, DatasetError) as error:
        raise InvalidField(field, str(error)) from error


@contextmanager
def facts_of_step(index: int, step: Step, *, base_model: str) -> Generator[None]:
    """Turn the library's errors about a step into facts; rows are named `rows[i]`.

    Args:
        index: Of the step in the request.
        step: The step.
        base_model: Model of the template the step uses; empty where there is none.

    Raises:
        InvalidField, UnknownComponent, DatasetNotReady, BaseModelNotFound, ServiceUnreachable: what they mean.
    """
    field = f'steps[{index}].{step.kind}'
    try:
        yield
    except NotReady as error:
        raise DatasetNotReady(f'{field}: {error}') from error
    except InvalidExample as error:
        place = f'rows[{error.row_index}].{error.field}'.rstrip('.')
        raise InvalidField(place, error.problem) from error
    except InvalidRow as error:
        raise InvalidField(f'rows[{error.row_index}].{error.column}', error.problem) from error
    except (PreprocessorError, DatasetError, TemplateError) as error:
        raise _component_fact(error, step, field) from error
    except HubUnreachable as error:
        raise ServiceUnreachable('hub') from error
    except HubError as error:
        raise BaseModelNotFound(base_model) from error


def _component_fact(error: Exception, step: Step, field: str) -> InvalidField | UnknownComponent:
    match step:
        case MapStep() if isinstance(error, UnknownPreprocessor):
            return UnknownComponent(f'{field}.preprocessor', 'preprocessor', step.preprocessor, preprocessor_names())
        case FilterStep() if isinstance(error, UnknownPreprocessor):
            return UnknownComponent(f'{field}.filter', 'filter', step.filter, filter_names())
        case TemplateStep() if isinstance(error, UnknownTemplate):
            return UnknownComponent(f'{field}.name', 'template', step.name, template_names())
        case _:
            part = '.init_args' if isinstance(error, InvalidArguments) else ''
            return InvalidField(f'{field}{part}', str(error))
