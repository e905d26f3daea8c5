"""Mixtures of streamed datasets, whose parts are read by one process each."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from twinkle_services.data.backends.hub_rows import HubAccess
from twinkle_services.data.backends.library import LibraryEngine
from twinkle_services.data.domain import (
    Dataset,
    DecodedBytes,
    DecodedLimits,
    FilterStep,
    HubSource,
    HubStream,
    MapStep,
    Row,
    Step,
    StreamMixture,
    StreamPart,
)
from twinkle_services.data.domain.dataset import Table, new_dataset
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.worker import Threads

pytestmark = pytest.mark.timeout(400)  # each part starts a process, which imports libraries

MAP = MapStep(preprocessor='SelfCognitionProcessor', init_args={'model_name': 'm', 'model_author': 'us'})
SHORT = FilterStep(filter='TextLengthFilter', init_args={'column': 'query', 'max_characters': 9})


def engine_of(**access: Any) -> LibraryEngine:
    """Return an engine that reads only streamed datasets."""
    limits = DecodedLimits(rows=100, dataset_bytes=1 << 30, tenant_bytes=1 << 30, total_bytes=1 << 30)
    return LibraryEngine(
        Threads('unused', count=1), base_models=(), access=HubAccess(**access), template_cache=1,
        download_limit_bytes=1, decoded=DecodedBytes(limits),
    )  # fmt: skip


def mixture_of(dataset_ids: Sequence[str], steps: Sequence[tuple[Step, ...]], *later: Step) -> Dataset:
    """Return an interleaved mixture of streams with their own steps, and with later steps of all rows."""
    parts = [
        StreamPart(stream=HubStream(hub=HubSource(dataset_id=dataset_id), revision='', columns=()), pending=pending)
        for dataset_id, pending in zip(dataset_ids, steps, strict=True)
    ]
    table = Table(rows=[], stream=StreamMixture(parts=tuple(parts), is_interleaved=True), pending=later)
    empty = new_dataset('ds-1', tenant_id='alice', create_time=datetime(2026, 1, 1, tzinfo=UTC))
    return empty.changed(table, later, ('r', 'f'))


def write(path: Path, *rows: Row) -> str:
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return str(path)


async def test_refused_rows_name_their_step_and_source(tmp_path: Path) -> None:
    """A row that a part refuses names the part, also after later steps; one that a step of the mixture refuses not."""
    chat = {'query': 'who?', 'response': 'me'}
    names = [
        write(tmp_path / 'a.jsonl', chat, {'query': 1, 'response': 'x'}),
        write(tmp_path / 'b.jsonl', {'query': 2, 'response': 'y'}, chat),
    ]
    found = await engine_of(local_roots=(tmp_path,)).stream_rows(
        mixture_of(names, [(SHORT,), ()], SHORT, MAP), begin=0, count=9
    )
    refusals = [(item.field, item.problem) for item in found if isinstance(item, InvalidField)]
    assert len(found) == 4
    assert [field for field, _ in refusals] == ['rows[1].query', 'rows[1].query']
    assert [problem.endswith(f'in a row of {names[0]}') for _, problem in refusals] == [False, True]
