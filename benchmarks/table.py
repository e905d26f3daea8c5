"""The performance table in the documentation: ratios to other programs, and to the same work without an optimization.

`./run bench table` measures every row, and writes `benchmarks/recorded.json` and `docs/performance.md`, which keep the
last run for each kind of machine. With `--check`, the command writes nothing, and reports the ratios that are more than
5 % below those recorded for this kind of machine. It compares nothing if no such machine is recorded.
"""

import argparse
import importlib
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from benchmarks.hardware import describe_hardware

_ROOT = Path(__file__).parents[1]
RECORD = _ROOT / 'benchmarks' / 'recorded.json'
"""Ratios and hardware of the last complete run on each kind of machine."""
PAGE = _ROOT / 'docs' / 'performance.md'
"""The page that `render` writes from `RECORD`."""
FACTS = ('processor', 'cores', 'accelerators')
"""Facts of the hardware in which two machines of the same kind agree."""
LARGEST_FALL = 0.05
"""A ratio is reported if it has decreased by more than this fraction since it was recorded."""


@dataclass(frozen=True)
class Row:
    """One ratio of a benchmark; a larger ratio is better."""

    work: str
    """The work that is measured."""
    peer: str
    """The program or path with which the work is compared."""
    goal: float
    command: str
    """Name of the benchmark, and its options."""
    figure: str
    """Keys of the ratio in the benchmark's figures, separated by slashes."""


_FLOAT32, _AUTO = 'peers --dtype float32 --parts training', 'peers --dtype auto --parts training'
_SAMPLING = 'peers --dtype float32 --parts sampling --threads 1'
_ALL_LABELS, _HALF = 'training/all_labels/ours_over_peft', 'training/half_of_the_labels/ours_over_peft'
_SHARED = 'four prompts of 48 tokens, 8 samples of 8 to 12/separate_over_shared'
_TENANTS = 'service/64/together_over_one_after_the_other'
ROWS = (
    Row('train a batch of 8 x 128 tokens, float32', 'peft', 1.0, _FLOAT32, _ALL_LABELS),
    Row('the same, half of the labels masked', 'peft', 1.2, _FLOAT32, _HALF),
    Row('train a batch of 8 x 128 tokens, `dtype: auto`', 'peft, float32', 1.5, _AUTO, _ALL_LABELS),
    Row('the same, half of the labels masked', 'peft, float32', 1.9, _AUTO, _HALF),
    Row('train four groups of 8 samples', 'the same without shared prompts', 3.0, 'shared_prompts --cases 1', _SHARED),
    Row('train eight tenants at once', 'one after the other', 1.25, 'co_batch --service --tokens 64', _TENANTS),
    Row('a whole GRPO iteration, float32', 'TRL', 3.5, 'grpo', 'trl_over_ours'),
    Row('sample 16 x 32 tokens, one adapter', 'HF generate', 1.4, _SAMPLING, 'sampling/one_adapter_over_generate'),
    Row('the same, eight adapters', 'with one adapter', 0.8, _SAMPLING, 'sampling/eight_adapters_over_one'),
    Row('sample the base model, 8 streams', 'plain vLLM', 0.95, 'sampling_throughput', '8/ratio_of_rounds'),
    Row(
        'publish an adapter of 10 MB', 'a folder that vLLM loads', 5.0, 'publish_to_live', '10_mb/times_faster_to_live'
    ),
)
"""Rows of the table, in their order."""


def main(arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Measure all rows and write the table, or compare with the recorded ratios; return the record or the report."""
    parser = argparse.ArgumentParser(prog='./run bench table')
    parser.add_argument('--check', action='store_true', help='compare with the recorded ratios, and write nothing')
    options = parser.parse_args(arguments)
    hardware = describe_hardware()
    records = json.loads(RECORD.read_text(encoding='utf-8')) if RECORD.exists() else []
    if options.check:
        recorded = record_of(hardware, records)
        report = report_of(recorded['ratios'], _measure()) if recorded else _unknown(hardware, records)
        print(report, file=sys.stderr)
        return {'report': report.splitlines()}
    record = {'hardware': hardware, 'ratios': _measure()}
    previous = record_of(hardware, records)
    if previous is None:
        records.append(record)
    else:
        records[records.index(previous)] = record
    RECORD.write_text(json.dumps(records, indent=2) + '\n', encoding='utf-8')
    PAGE.write_text(render(records), encoding='utf-8')
    return record


def _measure() -> list[dict[str, Any]]:
    """Run every benchmark of the rows once; return the ratio of each row."""
    figures: dict[str, Any] = {}
    for command in dict.fromkeys(row.command for row in ROWS):
        print(f'table: {command}', file=sys.stderr)
        name, *options = command.split()
        measure = importlib.import_module(f'benchmarks.{name}').main
        figures[command] = measure(options) if options else measure()
    date = {'date': f'{datetime.now(UTC):%Y-%m-%d}'}
    return [
        {**asdict(row), **date, **_spread(reduce(getitem, row.figure.split('/'), figures[row.command]))} for row in ROWS
    ]


def _spread(ratio: Any) -> dict[str, float]:
    """Return the median of a ratio, and its minimum and maximum if there are several rounds."""
    if isinstance(ratio, Mapping):
        return {name: round(ratio[name], 2) for name in ('median', 'least', 'most')}
    if isinstance(ratio, list):
        rounds = {'median': statistics.median(ratio), 'least': min(ratio), 'most': max(ratio)}
        return {name: round(value, 2) for name, value in rounds.items()}
    return {'median': round(ratio, 2)}


def record_of(hardware: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the record of a machine of the same kind, or None."""
    kind = [hardware[fact] for fact in FACTS]
    return next((one for one in records if [one['hardware'][fact] for fact in FACTS] == kind), None)


def _unknown(hardware: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> str:
    known = '; '.join(_machine(one['hardware']) for one in records) or 'none'
    return f'performance table: not compared, because {_machine(hardware)} is not among the recorded machines: {known}'


def _machine(hardware: Mapping[str, Any]) -> str:
    accelerators = ', '.join(hardware['accelerators']) or 'no GPU'
    return f'{hardware["cores"]} cores of {hardware["processor"]}, {accelerators}'


def report_of(recorded: Sequence[Mapping[str, Any]], measured: Sequence[Mapping[str, Any]]) -> str:
    """Return a report on the ratios that have fallen by more than `LARGEST_FALL`."""
    before = {_key(ratio): ratio['median'] for ratio in recorded}
    fallen: list[str] = []
    for ratio in measured:
        old = before.get(_key(ratio), 0.0)
        if ratio['median'] < (1 - LARGEST_FALL) * old:
            fallen.append(f'  {ratio["work"]}, against {ratio["peer"]}: {_figures(ratio)}, recorded {old}')
    if not fallen:
        return 'performance table: no ratio has fallen by more than 5 %'
    return '\n'.join(['performance table: these ratios have fallen by more than 5 %:', *fallen])


def _figures(ratio: Mapping[str, Any]) -> str:
    spread = f' ({ratio["least"]} to {ratio["most"]})' if 'least' in ratio else ''
    return f'{ratio["median"]}{spread}'


def render(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the page with the table in Markdown, with a column of ratios for each machine."""
    machines = [
        f'{number}. {_machine(record["hardware"])}, {record["hardware"]["memory_gib"]} GiB of memory; '
        f'torch {record["hardware"]["libraries"]["torch"]}; {record["ratios"][0]["date"]}'
        for number, record in enumerate(records, start=1)
    ]
    columns = ['work', 'compared with', 'goal', *(f'machine {number + 1}' for number in range(len(records)))]
    lines = [
        '# Performance',
        '',
        'Measured with `./run bench table`, which writes this page, on these machines:',
        '',
        *machines,
        '',
        'The model is SmolLM2-135M. A ratio of 2 means twice as fast. Both sides alternate in one run. Parentheses',
        'show the range over rounds. Each side has one thread, except in training with `peers`, where both use their',
        'default number.',
        '',
        '[LOG.md](LOG.md) has older measurements, and measurements without a comparison.',
        '',
        f'| {" | ".join([*columns, "benchmark"])} |',
        f'|{" --- |" * (len(columns) + 1)}',
    ]
    for row in ROWS:
        cells = [
            row.work,
            row.peer,
            row.goal,
            *(_cell(row, record['ratios']) for record in records),
            f'`{row.command}`',
        ]
        lines.append(f'| {" | ".join(map(str, cells))} |')
    return '\n'.join(lines) + '\n'


def _cell(row: Row, ratios: Sequence[Mapping[str, Any]]) -> str:
    key = (row.work, row.peer, row.command)
    return next((_figures(ratio) for ratio in ratios if _key(ratio) == key), 'not measured')


def _key(ratio: Mapping[str, Any]) -> tuple[str, str, str]:
    return ratio['work'], ratio['peer'], ratio['command']
