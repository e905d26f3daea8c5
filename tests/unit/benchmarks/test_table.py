"""The performance table: its page shows all ratios, and a comparison reports ratios that have fallen."""

import json
from dataclasses import asdict
from typing import Any

import pytest

from benchmarks import __main__ as benches
from benchmarks.table import PAGE, RECORD, ROWS, record_of, render, report_of


@pytest.fixture
def recorded() -> dict[str, Any]:
    """A record with a ratio for each row, in the form that a benchmark run writes."""
    hardware: dict[str, Any] = {
        'processor': 'X', 'cores': 2, 'memory_gib': 1.0, 'accelerators': [], 'libraries': {'torch': '2'}
    }  # fmt: skip
    ratios = [{**asdict(row), 'date': '2026-01-01', 'median': row.goal, 'least': 0.5, 'most': 9.0} for row in ROWS]
    return {'hardware': hardware, 'ratios': ratios}


def test_page_shows_every_ratio(recorded: dict[str, Any]) -> None:
    """The page has a line for each row with its ratios; they also show the spread if there are several rounds."""
    del recorded['ratios'][-1]['least']
    other = {'hardware': {**recorded['hardware'], 'processor': 'Y'}, 'ratios': recorded['ratios'][1:]}
    page = render([recorded, other])
    assert '1. 2 cores of X' in page
    assert '2. 2 cores of Y' in page
    lines = page.splitlines()[-len(ROWS) :]
    for line, row in zip(lines, ROWS, strict=True):
        cells = [cell.strip() for cell in line.split('|')[1:-1]]
        assert (cells[0], cells[2], cells[5]) == (row.work, str(row.goal), f'`{row.command}`')
        assert cells[3].startswith(str(row.goal))
        assert cells[4] == (cells[3] if row is not ROWS[0] else 'not measured')
    assert '(0.5 to 9.0)' in lines[0]
    assert '(' not in lines[-1].split('|')[4]


def test_committed_page_shows_the_committed_record() -> None:
    """The page in the documentation is rendered from the records, which have the rows of the table in order.

    A record lacks the rows that changed after its measurement, but one record has all rows.
    """
    records = json.loads(RECORD.read_text())
    assert PAGE.read_text() == render(records)
    rows = [(row.work, row.command) for row in ROWS]
    measured = [[(ratio['work'], ratio['command']) for ratio in record['ratios']] for record in records]
    assert rows in measured
    for found in measured:
        assert found == [row for row in rows if row in found]


def test_rows_name_benchmarks_that_exist() -> None:
    """The command of each row starts with a benchmark's name, and has options only if this benchmark has options."""
    for row in ROWS:
        name, *options = row.command.split()
        assert name in benches.BENCHMARKS
        assert not options or name in benches.WITH_OPTIONS


def test_a_fall_of_more_than_five_percent_is_reported(recorded: dict[str, Any]) -> None:
    """The report names exactly the rows that have fallen by more than 5 %; the order of the rows does not matter."""
    factors = [0.94, 0.96, *[1.5] * (len(ROWS) - 2)]
    measured = [
        {**ratio, 'median': ratio['median'] * factor} for ratio, factor in zip(recorded['ratios'], factors, strict=True)
    ]
    measured.append({**measured[0], 'work': 'something new'})
    heading, *lines = report_of(recorded['ratios'], measured[::-1]).splitlines()
    assert 'more than 5 %' in heading
    (line,) = lines
    assert ROWS[0].work in line
    assert f'recorded {recorded["ratios"][0]["median"]}' in line


def test_equal_ratios_are_reported_as_such(recorded: dict[str, Any]) -> None:
    """A run with the recorded ratios reports that no ratio has fallen."""
    report = report_of(recorded['ratios'], recorded['ratios'])
    assert report == 'performance table: no ratio has fallen by more than 5 %'


@pytest.mark.parametrize(('fact', 'value'), [('processor', 'Z80'), ('cores', 1024), ('accelerators', ['X, 1 MiB'])])
def test_other_machines_are_not_compared(recorded: dict[str, Any], fact: str, value: Any) -> None:
    """A machine has the record of its kind only, with any amount of memory."""
    hardware = recorded['hardware']
    other = {**hardware, fact: value}
    assert record_of(other, [recorded]) is None
    assert record_of({**hardware, 'memory_gib': 9.0}, [{**recorded, 'hardware': other}, recorded]) is recorded
