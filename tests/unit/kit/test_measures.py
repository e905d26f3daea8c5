"""Metrics have documented names, and callers cannot add series."""

import re
from contextlib import ExitStack
from typing import get_args

import pytest

from fixtures.recorded_metrics import metric, metrics_page, series
from fixtures.source_tree import ROOT
from twinkle_services.kit.telemetry import measures
from twinkle_services.kit.telemetry.instruments import OTHER, Counter, Gauge, Histogram
from twinkle_services.model.domain.operation import Verb

HOSTILE = ['', 'x' * 1000, '"} 1\nforged 1', 'ForwardBackward ', '../../etc', '\u202e', *map(str, range(200))]
KNOWN_LABELS = {'method', 'status', 'route', 'outcome', 'quota', 'verb', 'state', 'kind', 'encoding', 'cause'}
LIMITED_BY_CODE = {'method', 'status', 'route', 'outcome', 'quota'}
"""Labels without a list of values: names of the contracts, of routes, of error reasons and of quotas."""


def _record(item: Counter | Histogram | Gauge, value: str, stack: ExitStack) -> None:
    values = [value for _ in item.labels]
    if isinstance(item, Counter):
        item.add(1, *values)
    elif isinstance(item, Histogram):
        item.record(1, *values)
    else:
        stack.enter_context(item.observing(lambda: {value: 1.0} if item.labels else 1.0))


def test_prometheus_reads_each_metric_under_its_documented_name() -> None:
    """The page contains each metric under the name that the documentation and the dashboard use."""
    with ExitStack() as stack:
        for item in measures.all_metrics():
            _record(item, item.labels[0].values[0] if item.labels and item.labels[0].values else 'known', stack)
        page = metrics_page()
    found = set(re.findall(r'^# TYPE (twinkle_\S+)', page, re.MULTILINE))
    assert found == {item.prometheus_name for item in measures.all_metrics()}


def test_documentation_lists_every_metric() -> None:
    """The table of docs/observability.md equals the printed one."""
    assert measures.markdown_table() in (ROOT / 'docs/observability.md').read_text()


def test_verbs_are_those_of_the_model_service() -> None:
    """The values of the label `verb` are the names of all verbs of operations."""
    names = {item.__name__ for kind in get_args(Verb) for item in (get_args(kind) or (kind,))}
    assert set(measures.VERBS) == names


def test_labels_name_nothing_that_callers_choose() -> None:
    """Every label is on the list of labels with values from the code, and all but five have a list of values."""
    labels = {label.name: label for item in measures.all_metrics() for label in item.labels}
    assert labels.keys() <= KNOWN_LABELS
    assert {name for name, label in labels.items() if not label.values} == LIMITED_BY_CODE


@pytest.mark.parametrize('item', [item for item in measures.all_metrics() if item.labels and item.labels[0].values])
def test_made_up_values_of_a_label_add_one_series(item: Counter | Gauge | Histogram) -> None:
    """All values that are not in a label's list share one series."""
    with ExitStack() as stack:
        _record(item, OTHER, stack)
        before = series()
        for value in HOSTILE:
            _record(item, value, stack)
        assert series() == before


def test_gauge_adds_its_sources_and_forgets_them() -> None:
    """A gauge reports the sum of its sources, and no value after their blocks end."""
    name = measures.fleet_members.prometheus_name
    with measures.fleet_members.observing(lambda: {'ready': 2}):
        with measures.fleet_members.observing(lambda: {'ready': 1, 'lost': 4}):
            assert (metric(name, state='ready'), metric(name, state='lost')) == (3, 4)
        assert (metric(name, state='ready'), metric(name, state='lost')) == (2, 0)
    assert f'{name}{{' not in metrics_page()


def test_gauge_reads_a_collection_that_changes_meanwhile() -> None:
    """A source that fails because another thread changes a collection is read again."""
    failures = iter([True, True, False])

    def read() -> float:
        if next(failures):
            raise RuntimeError('dictionary changed size during iteration')
        return 7.0

    with measures.shared_memory.observing(read):
        assert metric(measures.shared_memory.prometheus_name) == 7
