"""Converts the component library's errors to the service's errors."""

from collections.abc import Generator
from contextlib import contextmanager

import structlog

from twinkle.dataset import ROW_ERRORS, DatasetError, InvalidExample, NotReady, UnreadableFile
from twinkle.hub import DownloadTooLarge, HubError, RepositoryMoved
from twinkle.preprocessor import (
    InvalidArguments,
    InvalidRow,
    PreprocessorError,
    UnknownPreprocessor,
    filter_names,
    preprocessor_names,
)
from twinkle.template import TemplateError, UnknownTemplate, template_names
from twinkle_services.data.domain import DatasetNotReady, FilterStep, HubIdNotFound, MapStep, Step, Table, TemplateStep
from twinkle_services.kit.errors import InvalidField, UnknownComponent

_log = structlog.get_logger('data')


@contextmanager
def source_errors(field: str, *, hub_id: str = '') -> Generator[None]:
    """Convert the library's errors about a source.

    Args:
        field: Field path of the source in the request.
        hub_id: Hub id of the source; empty for an uploaded file.

    Raises:
        HubIdNotFound: The hub id cannot be resolved.
        InvalidField: The source cannot be read, is too large to be downloaded, or was renamed.
    """
    try:
        yield
    except DownloadTooLarge as error:
        raise InvalidField(field, f'{error}; upload the files that are needed') from error
    except RepositoryMoved as error:
        raise InvalidField(field, str(error)) from error
    except HubError as error:
        raise HubIdNotFound(hub_id) from error
    except (UnreadableFile, DatasetError) as error:
        raise InvalidField(field, str(error)) from error


@contextmanager
def step_errors(index: int, step: Step, table: Table) -> Generator[None]:
    """Convert the library's errors about a step; the field path of a row's error begins with `rows[i]`.

    Args:
        index: Index of the step in the request.
        step: The step.
        table: The table of the step; errors name its dataset and its template.

    Raises:
        InvalidField: A row or an argument is invalid, or the template's model was renamed.
        UnknownComponent: The step names an unknown component.
        DatasetNotReady: A required earlier step is missing, or the step was already applied.
        HubIdNotFound: The template's model was not found.
    """
    field = f'steps[{index}].{step.kind}'
    try:
        yield
    except NotReady as error:
        raise DatasetNotReady(table.dataset_id, error.needs, f'{field}: {error}') from error
    except InvalidExample as error:
        path = f'rows[{error.row_index}].{error.field}'.rstrip('.')
        raise InvalidField(path, error.problem) from error
    except InvalidRow as error:
        raise InvalidField(f'rows[{error.row_index}].{error.column}', error.problem) from error
    except (PreprocessorError, DatasetError, TemplateError, RepositoryMoved) as error:
        raise _component_error(error, step, field) from error
    except HubError as error:
        template = step if isinstance(step, TemplateStep) else table.template
        raise HubIdNotFound(template.base_model if template is not None else '') from error


def row_error(error: Exception, index: int, step: Step, *, dataset_id: str) -> InvalidField:
    """Return the error of a row that a step of a lazy or streamed dataset refused.

    Args:
        error: The library's error.
        index: Index of the step in the dataset.
        step: The step.
        dataset_id: Id of the dataset, for the log.

    Raises:
        UnknownComponent, DatasetNotReady, HubIdNotFound: See `step_errors`.
    """
    try:
        with step_errors(index, step, Table(rows=[])):
            raise error
    except InvalidField as converted:
        return converted
    except ROW_ERRORS as unknown:
        _log.warning('row failed', dataset=dataset_id, step=step.kind, error=str(unknown))
        problem = f'has a row that steps[{index}].{step.kind} cannot process ({type(unknown).__name__})'
        return InvalidField('dataset_id', problem)


def _component_error(error: Exception, step: Step, field: str) -> InvalidField | UnknownComponent:
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
