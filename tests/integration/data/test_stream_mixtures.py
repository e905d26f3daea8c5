"""Mixtures of streamed datasets, whose parts are read by one process each."""

import asyncio
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from fixtures.fake_hub import FakeHub, running_hub
from twinkle_services.data.backends.hub_rows import HubAccess
from twinkle_services.data.backends.library import LibraryEngine
from twinkle_services.data.domain import (
    Dataset,
    DecodedBytes,
    DecodedLimits,
    FilterStep,
    HubSource,
    HubStream,
    Loader,
    MapStep,
    Row,
    Step,
    StreamMixture,
    StreamPart,
)
from twinkle_services.data.domain.dataset import Table, new_dataset
from twinkle_services.kit.errors import InvalidField, ServiceUnreachable
from twinkle_services.kit.worker import Threads

pytestmark = pytest.mark.timeout(400)  # each part starts a process, which imports libraries

MAP = MapStep(preprocessor='SelfCognitionProcessor', init_args={'model_name': 'm', 'model_author': 'us'})
SHORT = FilterStep(filter='TextLengthFilter', init_args={'column': 'query', 'max_characters': 9})


CHAT = {'query': 'who?', 'response': 'me'}
LOADER = Loader(
    loader_id='ld-1', tenant_id='alice', dataset_id='ds-1', content_digest='d', row_count=0, batch_size=2,
    shuffle_seed=None, epoch_count=1, is_last_partial_dropped=False, request_id='r', fingerprint='f', is_streamed=True,
)  # fmt: skip


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """A hub with three datasets, which does not respond before the test sets `stopped`."""
    with running_hub(delay_seconds=300.0) as running:
        for name in ('a', 'b', 'c'):
            running.is_private[f'org/{name}'] = False
            running.files[f'org/{name}'] = {'train.jsonl': json.dumps({'x': name}).encode()}
        settings = {'HF_ENDPOINT': running.url, 'HF_HOME': str(tmp_path / 'hf'), 'TWINKLE_HUB_DIR': ''}
        for variable, value in settings.items():
            monkeypatch.setenv(variable, value)
        yield running


def readers() -> list[psutil.Process]:
    """Return the processes of this one that read datasets."""
    return [child for child in psutil.Process().children() if any('hub_process' in word for word in child.cmdline())]


def engine_of(**access: Any) -> LibraryEngine:
    """Return an engine that reads only streamed datasets."""
    limits = DecodedLimits(rows=100, dataset_bytes=1 << 30, tenant_bytes=1 << 30, total_bytes=1 << 30)
    return LibraryEngine(
        Threads('unused', count=1), base_models=(), access=HubAccess(**access), template_cache=1,
        download_limit_bytes=1, decoded=DecodedBytes(limits),
    )  # fmt: skip


def mixture_of(dataset_ids: Sequence[str], steps: Sequence[tuple[Step, ...]], *later: Step) -> Dataset:
    """Return an interleaved mixture of streams. Each stream has steps, and further steps apply to all rows."""
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


def wait_for_exits(processes: Iterable[psutil.Process]) -> None:
    """Wait until all threads of child processes have ended, without reading their exit statuses."""
    for process in processes:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


async def test_refused_rows_name_their_step_and_source(tmp_path: Path) -> None:
    """The error for a row names the part whose steps refuse it, and no part if the steps of the mixture refuse it."""
    names = [
        write(tmp_path / 'a.jsonl', CHAT, {'query': 1, 'response': 'x'}),
        write(tmp_path / 'b.jsonl', {'query': 2, 'response': 'y'}, CHAT),
    ]
    found = await engine_of(local_roots=(tmp_path,)).stream_rows(
        mixture_of(names, [(SHORT,), ()], SHORT, MAP), begin=0, count=9
    )
    refusals = [(item.field, item.problem) for item in found if isinstance(item, InvalidField)]
    assert len(found) == 4
    assert [field for field, _ in refusals] == ['rows[1].query', 'rows[1].query']
    assert [problem.endswith(f'in a row of {names[0]}') for _, problem in refusals] == [False, True]


async def test_parts_are_opened_together(hub: FakeHub) -> None:
    """All processes of an interleaved mixture run before the first one has read a row."""
    mixed = mixture_of(['hf://org/a', 'hf://org/b', 'hf://org/c'], [()] * 3)
    reading = asyncio.create_task(engine_of().stream_rows(mixed, begin=0, count=9))
    await asyncio.to_thread(hub.asked.wait)
    assert len(readers()) == 3
    hub.stopped.set()
    assert await reading == [{'x': 'a'}, {'x': 'b'}, {'x': 'c'}]
    assert readers() == []


async def test_a_failed_part_ends_the_others(hub: FakeHub, tmp_path: Path) -> None:
    """A part that cannot be read ends the mixture and the processes of parts that still wait for their hub."""
    mixed = mixture_of([str(tmp_path / 'absent'), 'hf://org/a'], [()] * 2)
    with pytest.raises(ServiceUnreachable):
        await engine_of(local_roots=(tmp_path,)).stream_rows(mixed, begin=0, count=9)
    assert readers() == []


async def test_failed_part_is_reported_before_its_turn(tmp_path: Path) -> None:
    """If the process of a part fails, the next read of any part raises an error that names the failed part."""
    first = write(tmp_path / 'a.jsonl', *({'x': number} for number in range(9)))
    second = tmp_path / 'b'
    second.mkdir()
    write(second / 'train-0.jsonl', *({'x': number} for number in range(9)))
    (second / 'train-1.jsonl').write_text('damaged')
    stream = engine_of(local_roots=(tmp_path,)).stream(mixture_of([first, str(second)], [()] * 2), LOADER, consumed=0)
    earlier = set(psutil.Process().children())

    async def read_two_batches() -> None:
        # On a busy machine, a process may have ended before the first batch is read.
        assert await stream.next() == ([{'x': 0}, {'x': 0}], 0)
        await asyncio.to_thread(wait_for_exits, set(psutil.Process().children()) - earlier)
        await stream.next()

    with closing(stream), pytest.raises(InvalidField) as failed:
        await read_two_batches()
    assert str(second) in failed.value.problem


async def test_a_closed_stream_ends_all_parts(hub: FakeHub) -> None:
    """Closing a stream while its parts are opened ends all of their processes."""
    stream = engine_of().stream(mixture_of(['hf://org/a', 'hf://org/b'], [()] * 2), LOADER, consumed=0)
    reading = asyncio.create_task(stream.next())
    await asyncio.to_thread(hub.asked.wait)
    found = readers()
    assert len(found) == 2
    stream.close()
    with pytest.raises(InvalidField):
        await reading
    assert readers() == []
