"""Spans that a program writes to its own folders."""

from pathlib import Path

from opentelemetry import trace

from twinkle.telemetry import read_spans
from twinkle_client.tracing import tracing_to


def test_each_block_writes_to_its_own_folder(tmp_path: Path) -> None:
    """A span is written to the folder of the outermost block, and spans outside of any block are not written."""
    tracer = trace.get_tracer('test')
    for name in ('first', 'second'):
        with tracing_to(tmp_path / name), tracer.start_as_current_span(name), tracing_to(tmp_path / 'inner'):
            pass
        tracer.start_span('outside').end()
    found = {name: [span.name for span in read_spans(tmp_path / name)] for name in ('first', 'second', 'inner')}
    assert found == {'first': ['first'], 'second': ['second'], 'inner': []}
