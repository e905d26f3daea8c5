"""The dashboard and the alert rules use metrics and labels that the services record, and Prometheus accepts them."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from fixtures.source_tree import ROOT
from twinkle_services.kit.telemetry import measures
from twinkle_services.kit.telemetry.instruments import Histogram

FOLDER = ROOT / 'deploy/observability'
ADDED_LABELS = {'job', 'instance', 'le'}
"""Labels that Prometheus adds to each series, and the label of histogram buckets."""
SELECTOR = re.compile(r'\b(twinkle_\w+)(?:\{([^}]*)\})?')
GROUPING = re.compile(r'\b(?:by|ignoring)\s*\(([^)]*)\)')


def _board() -> dict[str, Any]:
    return json.loads((FOLDER / 'dashboard.json').read_text())


def _panels() -> list[dict[str, Any]]:
    return [panel for panel in _board()['panels'] if panel['type'] != 'row']


def _board_expressions() -> Iterator[str]:
    for panel in _panels():
        for target in panel['targets']:
            yield cast(str, target['expr']).replace('$__rate_interval', '5m')


def _alert_expressions() -> Iterator[str]:
    for group in yaml.safe_load((FOLDER / 'alerts.yaml').read_text())['groups']:
        yield from (rule['expr'] for rule in group['rules'])


def _labels_by_series() -> dict[str, set[str]]:
    """Return the labels of each series that Prometheus stores, by the name of the series."""
    found: dict[str, set[str]] = {}
    for metric in measures.all_metrics():
        labels = {label.name for label in metric.labels}
        suffixes = ('_bucket', '_sum', '_count') if isinstance(metric, Histogram) else ('',)
        found |= {f'{metric.prometheus_name}{suffix}': labels for suffix in suffixes}
    return found


@pytest.mark.parametrize('expressions', [_board_expressions, _alert_expressions])
def test_expressions_use_recorded_metrics_and_labels(expressions: Any) -> None:
    """Each metric in an expression is recorded, with the labels that the expression selects and groups by."""
    known = _labels_by_series()
    for expression in expressions():
        names = {name for name, _ in SELECTOR.findall(expression)}
        assert names <= known.keys(), expression
        labels = ADDED_LABELS.union(*(known[name] for name in names))
        used = {
            label for _, selector in SELECTOR.findall(expression) for label in re.findall(r'(\w+)\s*[=!]', selector)
        }
        used |= {label.strip() for group in GROUPING.findall(expression) for label in group.split(',')}
        assert used <= labels, expression


def test_board_shows_every_metric() -> None:
    """Each metric that the services record is shown on the dashboard."""
    shown = {name for expression in _board_expressions() for name, _ in SELECTOR.findall(expression)}
    missing = [
        metric.prometheus_name
        for metric in measures.all_metrics()
        if not any(re.fullmatch(rf'{metric.prometheus_name}(_bucket|_sum|_count)?', name) for name in shown)
    ]
    assert missing == []


def test_panels_have_unique_ids_and_places() -> None:
    """All panels of the dashboard have different ids, do not overlap, and read from the selected source."""
    panels = _board()['panels']
    assert len({panel['id'] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel['gridPos'] for panel in panels)
        for x in range(place['x'], place['x'] + place['w'])
        for y in range(place['y'], place['y'] + place['h'])
    ]
    assert len(set(cells)) == len(cells)
    assert {panel['datasource']['uid'] for panel in _panels()} == {'${datasource}'}


@pytest.mark.parametrize('command', ['check config prometheus.yaml', 'test rules alerts_test.yaml'])
def test_prometheus_accepts_configuration_and_alerts(command: str, promtool: str) -> None:
    """Prometheus accepts the example configuration, and the alerts pass their tests."""
    _run(promtool, *command.split(), folder=FOLDER)


def test_prometheus_accepts_the_expressions_of_the_board(promtool: str, tmp_path: Path) -> None:
    """Prometheus parses every expression of the dashboard."""
    rules = [{'record': f'panel:{index}', 'expr': text} for index, text in enumerate(_board_expressions())]
    (tmp_path / 'board.yaml').write_text(yaml.safe_dump({'groups': [{'name': 'board', 'rules': rules}]}))
    _run(promtool, 'check', 'rules', 'board.yaml', folder=tmp_path)


@pytest.fixture
def promtool() -> str:
    """Path of Prometheus' tool. Without the tool, tests fail in CI and are skipped elsewhere."""
    found = shutil.which('promtool')
    if found is None:
        fail_or_skip = pytest.fail if os.environ.get('CI') else pytest.skip
        fail_or_skip('promtool is missing; install Prometheus (for example: apt-get install prometheus)')
    return found


def _run(promtool: str, *arguments: str, folder: Path) -> None:
    done = subprocess.run([promtool, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
