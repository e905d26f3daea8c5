"""The spans of an operation show its time in the queue, its pass and its journal write, with their attributes."""

from pathlib import Path
from typing import Any

from opentelemetry import propagate, trace

from fixtures.checkpoint_service import as_tenant
from fixtures.model_service import draw_example, forward_backward, operation_of
from twinkle.api.model.v1 import operation_pb2, training_service_pb2
from twinkle.telemetry import SpanRecord, read_spans
from twinkle_client.tracing import tracing_to

BATCH = [draw_example(10, 1), draw_example(17, 2)]
TOKENS = sum(len(example['input_ids']) for example in BATCH)
_tracer = trace.get_tracer('test')


async def _traced(service: Any, adapter_id: str, number: int, **verb: Any) -> str:
    """Run an operation in a new trace and return the id of the trace."""
    with _tracer.start_as_current_span('client') as span:
        headers: dict[str, str] = {}
        propagate.inject(headers)
        request = training_service_pb2.ExecuteRequest(operation=operation_of(adapter_id, number, **verb))
        metadata = (*as_tenant('alice', scopes='train'), *headers.items())
        await service.training.Execute(request, metadata=metadata)
        return f'{span.get_span_context().trace_id:032x}'


def _only(spans: list[SpanRecord], name: str) -> SpanRecord:
    (found,) = [span for span in spans if span.name == name]
    return found


async def test_spans_of_an_operation_have_content(service: Any, tmp_path: Path) -> None:
    """The spans are children of the operation's span, lie inside it, and have its verb, adapter and tokens."""
    adapter_id = (await service.create()).adapter_id
    with tracing_to(tmp_path / 'spans'):
        trace_id = await _traced(service, adapter_id, 1, forward_backward=forward_backward(BATCH))
        await _traced(service, adapter_id, 2, clip_grad_and_step=operation_pb2.ClipGradAndStep())
    spans = list(read_spans(tmp_path / 'spans', trace_id=trace_id))
    server = _only(spans, 'twinkle.api.model.v1.TrainingService/Execute')
    operation = _only(spans, 'operation ForwardBackward')
    assert (server.kind, operation.parent_id) == ('server', server.span_id)
    assert server.attributes['rpc.response.status_code'] == 'OK'
    expected = {'verb': 'ForwardBackward', 'adapter_id': adapter_id, 'sequence_number': '1', 'token_count': str(TOKENS)}
    assert {f'twinkle.{name}': value for name, value in expected.items()}.items() <= operation.attributes.items()
    for name in ('queue', 'pass', 'journal write'):
        span = _only(spans, name)
        assert span.parent_id == operation.span_id
        assert operation.start_ns - 10**6 <= span.start_ns <= span.end_ns <= operation.end_ns + 10**6
    assert _only(spans, 'pass').attributes['twinkle.token_count'] == str(TOKENS)


async def test_only_faults_of_the_server_mark_its_spans_as_failed(service: Any, tmp_path: Path) -> None:
    """A refused request does not mark the server span as an error; the status names the refusal."""
    with tracing_to(tmp_path / 'spans'), _tracer.start_as_current_span('client') as span:
        headers: dict[str, str] = {}
        propagate.inject(headers)
        request = training_service_pb2.ExecuteRequest(operation=operation_of('unknown', 1))
        request.operation.zero_grad.SetInParent()
        call = service.training.Execute(request, metadata=(*as_tenant('alice', scopes='train'), *headers.items()))
        code = await call.code()
        trace_id = f'{span.get_span_context().trace_id:032x}'
    spans = list(read_spans(tmp_path / 'spans', trace_id=trace_id))
    server = _only(spans, 'twinkle.api.model.v1.TrainingService/Execute')
    assert (server.attributes['rpc.response.status_code'], server.is_error) == (code.name, False)
    assert code.name == 'NOT_FOUND'
