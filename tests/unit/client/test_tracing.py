"""Tests of spans that a program writes to its own folders."""

from pathlib import Path

from opentelemetry import trace

from twinkle.telemetry import read_spans
from twinkle_client.tracing import tracing_to


def test_each_outer_block_writes_to_its_own_folder(tmp_path: Path) -> None:
    """The outermost block determines the folder of a span; spans outside of any block are not written."""
    tracer = trace.get_tracer('test')
    for name in ('first', 'second'):
        with tracing_to(tmp_path / name), tracer.start_as_current_span(name), tracing_to(tmp_path / 'inner'):
            pass
        tracer.start_span('outside').end()
    found = {name: [span.name for span in read_spans(tmp_path / name)] for name in ('first', 'second', 'inner')}
    assert found == {'first': ['first'], 'second': ['second'], 'inner': []}
