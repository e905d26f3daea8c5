"""Spans are recorded only if something receives them, and log lines name the current span."""

import json
import subprocess
import sys
from pathlib import Path

from twinkle.telemetry import read_spans

PROGRAM = """
import sys
import structlog
from pathlib import Path
from opentelemetry import trace
from twinkle_services.kit.telemetry import TelemetryConfig, spans, start_telemetry, stop_telemetry
folder = Path(sys.argv[1]) if sys.argv[1:] else None
start_telemetry(TelemetryConfig(is_log_json=True, trace_dir=folder), service='data')
log = structlog.get_logger('test')
log.info('outside')
with trace.get_tracer('test').start_as_current_span('root'), spans.span('inner', token_count=3):
    log.info('inside')
stop_telemetry()
"""


def _lines(*arguments: str) -> dict[str, dict[str, str]]:
    """Run the program, and return its log lines by event."""
    done = subprocess.run([sys.executable, '-c', PROGRAM, *arguments], check=True, capture_output=True, text=True)
    return {line['event']: line for line in map(json.loads, done.stderr.splitlines())}


def test_log_lines_name_the_span(tmp_path: Path) -> None:
    """A log line within a span contains the ids of the trace and of the span, which the trace file has too."""
    lines = _lines(str(tmp_path))
    spans = {span.name: span for span in read_spans(tmp_path)}
    inner = spans['inner']
    assert (lines['inside']['trace_id'], lines['inside']['span_id']) == (inner.trace_id, inner.span_id)
    assert (inner.parent_id, inner.attributes) == (spans['root'].span_id, {'twinkle.token_count': '3'})
    assert 'trace_id' not in lines['outside']


def test_nothing_is_recorded_without_a_receiver() -> None:
    """No span is created without a trace folder and a collector."""
    assert 'trace_id' not in _lines()['inside']
