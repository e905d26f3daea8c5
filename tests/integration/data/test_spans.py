"""Tests of the data service's spans."""

from pathlib import Path

from fixtures.data_service import ENCODE, rows, serving_data, set_template
from twinkle.telemetry import read_spans
from twinkle_client.tracing import tracing_to


async def test_encoding_has_a_span(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """The trace of a request that encodes rows contains the time that the template takes."""
    source = rows({'messages': [{'role': 'user', 'content': 'q'}]})
    async with serving_data(tmp_path, base_models=(str(tiny_llama_dir),)) as service:
        with tracing_to(tmp_path / 'spans'):
            await service.create(source, set_template(tiny_llama_dir), ENCODE)
    spans = {span.name: span for span in read_spans(tmp_path / 'spans')}
    server = spans['twinkle.api.data.v1.DatasetService/CreateDataset']
    assert (spans['template'].trace_id, spans['template'].parent_id) == (server.trace_id, server.span_id)
    assert spans['template'].attributes == {'twinkle.step_count': '2'}
