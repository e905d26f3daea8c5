"""Errors of rows that the steps of a lazy dataset refuse."""

from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from fixtures.tiny_templates import tiny_template
from twinkle.template import Template, TemplateError
from twinkle_services.data.backends.lazy_rows import LazyReader
from twinkle_services.data.domain import CheckStep, EncodeStep, FilterStep, MapStep, Row, Step, TemplateStep
from twinkle_services.data.domain.dataset import Dataset, Table, new_dataset
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.worker import Threads

MAP = MapStep(preprocessor='SelfCognitionProcessor', init_args={'model_name': 'm', 'model_author': 'us'})
SHORT = FilterStep(filter='TextLengthFilter', init_args={'column': 'query', 'max_characters': 99})
TEMPLATE = TemplateStep(base_model='tiny')
STEPS: tuple[Step, ...] = (SHORT, MAP, TEMPLATE, CheckStep(), MAP, EncodeStep())
CHAT = {'query': 'who?', 'response': 'me'}


class Rows:
    """Reader of rows in memory."""

    def __init__(self, *rows: Row) -> None:
        self._rows = rows

    async def read(self, indices: Sequence[int]) -> list[Row]:
        """Return the rows at some indices."""
        return [self._rows[index] for index in indices]


class FailingTemplate(Template):
    """Template whose checks fail with an error that names no row."""

    error: Exception

    def batch_check(self, trajectories: Any) -> list[str | None]:
        """Raise the error."""
        raise self.error


def lazy() -> Dataset:
    """Return a lazy dataset with `STEPS`, whose filter has been applied and whose template is set."""
    pending = tuple(step for step in STEPS if step not in (SHORT, TEMPLATE))
    table = Table(rows=[CHAT], is_lazy=True, template=TEMPLATE, pending=pending)
    empty = new_dataset('ds-1', tenant_id='alice', create_time=datetime(2026, 1, 1, tzinfo=UTC))
    return empty.changed(table, STEPS, ('r', 'f'))


async def refusal_of(reader: LazyReader, index: int) -> InvalidField:
    """Return the refusal of a row."""
    with pytest.raises(InvalidField) as refused:
        await reader.read([index])
    return refused.value


@pytest.mark.parametrize('error', [TemplateError('broken'), ValueError('broken')])
async def test_errors_without_a_row_name_the_step_that_failed(tmp_path: Path, error: Exception) -> None:
    """An error without a row names the step that failed, which need not be the last one; its index counts all steps."""
    template = tiny_template(tmp_path, kind=FailingTemplate)
    template.error = error
    with closing(Threads('rows', count=1)) as threads:
        refused = await refusal_of(LazyReader(lazy(), Rows(CHAT), threads, lambda _: template), 0)
    assert 'steps[3].check' in f'{refused.field} {refused.problem}'


async def test_refused_rows_have_their_index_in_the_dataset(tmp_path: Path) -> None:
    """A row that a step refuses is named by its index in the dataset."""
    template = tiny_template(tmp_path)
    with closing(Threads('rows', count=1)) as threads:
        reader = LazyReader(lazy(), Rows(CHAT, CHAT, {'query': 1, 'response': 'x'}), threads, lambda _: template)
        assert (await refusal_of(reader, 2)).field == 'rows[2].query'
