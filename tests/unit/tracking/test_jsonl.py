"""Unit tests of the backend 'jsonl'."""

import json
from pathlib import Path

import pytest

from twinkle.tracking import JsonlBackend, open_tracker


def lines_of(path: Path) -> list[dict[str, float]]:
    """Return the lines of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_files_are_named_after_the_project_and_the_run(tmp_path):
    """The numbers and the description of a run are two adjacent files in the project's folder."""
    with open_tracker('jsonl', folder=tmp_path, project='names', run_id='r-1', config={'lr': 0.5}) as tracker:
        tracker.log({'loss': 1.5}, step=3)
    assert sorted(path.name for path in (tmp_path / 'names').iterdir()) == ['r-1.json', 'r-1.jsonl']
    assert lines_of(tmp_path / 'names' / 'r-1.jsonl') == [{'step': 3, 'loss': 1.5}]
    description = json.loads((tmp_path / 'names' / 'r-1.json').read_text())
    assert description['status'] == 'finished'
    assert description['create_time'] <= description['end_time']


def test_new_runs_have_different_ids(tmp_path):
    """Each run that is opened without an id has new files."""
    for _ in range(3):
        open_tracker('jsonl', folder=tmp_path).finish()
    assert len(list((tmp_path / 'twinkle').glob('*.jsonl'))) == 3


def test_an_incomplete_line_is_removed(tmp_path):
    """A run that was killed in the middle of a line continues after its last complete line."""
    with open_tracker('jsonl', folder=tmp_path, run_id='r') as tracker:
        tracker.log({'loss': 1.0}, step=0)
    path = tmp_path / 'twinkle' / 'r.jsonl'
    created = json.loads(path.with_suffix('.json').read_text())['create_time']
    with path.open('a') as file:
        file.write('{"step": 1, "lo')
    with open_tracker('jsonl', folder=tmp_path, run_id='r') as tracker:
        tracker.log({'loss': 0.5}, step=1)
    assert lines_of(path) == [{'step': 0, 'loss': 1.0}, {'step': 1, 'loss': 0.5}]
    assert json.loads(path.with_suffix('.json').read_text())['create_time'] == created


def test_a_file_of_another_run_is_refused(tmp_path):
    """A run whose path belongs to another run is refused, and the file is unchanged."""
    path = tmp_path / 'curves.jsonl'
    with open_tracker([JsonlBackend(path)], run_id='first') as tracker:
        tracker.log({'loss': 1.0}, step=0)
    with pytest.raises(ValueError, match=r"curves\.json belongs to run 'first'; pass this run_id"):
        open_tracker([JsonlBackend(path)], run_id='second')
    assert lines_of(path) == [{'step': 0, 'loss': 1.0}]
    with pytest.raises(ValueError, match=r'use \.jsonl'):
        JsonlBackend(tmp_path / 'curves.json')
