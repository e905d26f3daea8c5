"""Program that reads a dataset of a hub with the library `datasets`, and writes its rows as lines of JSON.

The data service runs it in a process, so that the files of a hub cannot exhaust the memory of the service or end it,
and so that the service does not import the library. `hub_rows.py` starts the program and reads its lines.
"""

import json
import os
import re
import resource
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, date, datetime, time
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from twinkle.dataset import DatasetError, DatasetMeta, open_source, stream_rows
from twinkle.hub import HubError, RepositoryMoved, find_dataset

ROW, FOUND, FAILED, END = 'r', 'f', 'e', '.'
"""First characters of a line: a row, the revision and columns, an error, and the end of the rows."""
_RESERVED_BYTES = 2 << 30
"""Address space that pyarrow and other libraries reserve, but do not use."""
_READERS = frozenset({'arrow', 'conll', 'csv', 'json', 'parquet', 'text', 'xml'})
"""Modules of `datasets` whose rows can be JSON. Those for images and archives look for files of this machine by the
names that are stored in a dataset."""


def main() -> int:
    """Write the lines of the request in the first argument, and return the exit status, which is 1 after an error.

    The fields of the request are those of `hub_rows.RowProcess`.
    """
    threading.Thread(target=end_with_service, daemon=True).start()
    request: dict[str, Any] = json.loads(sys.argv[1])
    limit = request['memory_bytes'] + _RESERVED_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    # The libraries may print to the standard output.
    output = os.fdopen(os.dup(sys.stdout.fileno()), 'w', encoding='utf-8')
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    status = 1
    try:
        for kind, value in _lines(request):
            _write(output, kind, value)
        status = 0
    except MemoryError:
        problem = f'needs more than {request["memory_bytes"]} bytes of memory; write its files in smaller pieces'
        _write(output, FAILED, ['DatasetError', problem])
    except (DatasetError, HubError, OSError) as error:
        kind = 'DatasetError' if isinstance(error, DatasetError | RepositoryMoved) else 'HubError'
        _write(output, FAILED, [kind, str(error)])
    _write(output, END, None)
    output.flush()
    return status


def end_with_service() -> None:
    """Wait for the end of the input, which the service keeps open until it exits or is killed; then end this process.

    A killed service cannot remove the folder of this process. `rm` replaces the process, so that no other thread writes
    to the folder meanwhile, and ignores the files that an exiting service removes at the same time.
    """
    while os.read(sys.stdin.fileno(), 1024):
        pass
    try:
        os.execvp('rm', ['rm', '-rf', '--', os.environ['HF_DATASETS_CACHE']])  # noqa: S606, S607 (no shell; any `rm`)
    finally:
        os._exit(1)


def _lines(request: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    revision = request['revision']
    meta = DatasetMeta(
        request['dataset_id'],
        subset_name=request['subset_name'],
        split=request['split'],
        data_slice=slice(request['begin_row'], request['end_row']),
        options={'revision': revision} if revision else {},
    )
    access = {name: request[name] for name in ('is_local_allowed', 'is_private_allowed')}
    path = find_dataset(request['dataset_id'], **access)
    if path is None and request['dataset_id'].startswith('ms://'):
        raise DatasetError('datasets on ModelScope cannot be streamed; create the dataset without is_streamed')
    _confine_files(path)
    source = open_source(meta, **access, is_move_allowed=False, is_streamed=True, readers=_READERS)
    rows = stream_rows(meta, source)
    first = next(rows, None)
    found = re.match(r'hf://datasets/[^@]+@([0-9a-f]{40})/', next(iter(source.files()), ''))
    yield FOUND, [found[1] if found else '', list(first or ())]
    yield from ((ROW, row) for row in chain([] if first is None else [first], rows))


def _confine_files(path: Path | None) -> None:
    """Prevent the library from opening files other than those of the dataset and of the library's cache."""
    from twinkle_services.data.backends.hub_files import confine_files  # noqa: PLC0415 - not imported by the service

    folders = [Path(os.environ['HF_DATASETS_CACHE']), *([] if path is None else [path, path.resolve()])]
    confine_files(folders, is_hub_allowed=path is None)


def _write(output: TextIO, kind: str, value: Any) -> None:
    if kind == ROW:
        text = '{' + ', '.join(f'{json.dumps(name)}: {_json_of(name, item)}' for name, item in value.items()) + '}'
    else:
        text = json.dumps(value)
    output.write(f'{kind}{text}\n')


def _json_of(name: str, value: Any) -> str:
    try:
        return json.dumps(value, default=_as_json)
    except (TypeError, ValueError, RecursionError) as error:
        problem = f'column {name!r} has a value that rows cannot have: {error}; store plain numbers, strings and lists'
        raise DatasetError(problem) from error


def _as_json(value: Any) -> Any:
    """Convert a value whose type JSON lacks to text, in the form that docs/datasets.md lists."""
    if isinstance(value, datetime):
        moment = value if value.tzinfo is None else value.astimezone(UTC)
        return moment.replace(tzinfo=None).isoformat(' ', 'microseconds') + ('Z' if value.tzinfo else '')
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    raise TypeError(f'{type(value).__name__} is not supported')


if __name__ == '__main__':
    sys.exit(main())
