"""Spans of HTTP calls have the attributes of OpenTelemetry's conventions."""

from pathlib import Path

import httpx

from fixtures.running_gateway import running_gateway
from twinkle.telemetry import SpanRecord, read_spans
from twinkle_client.tracing import tracing_to


async def test_http_calls_have_standard_attributes(tmp_path: Path) -> None:
    """A span has method, route and status. Only server faults are errors, and calls without a key have no span."""
    async with running_gateway(tmp_path, http_listen='127.0.0.1:0') as gateway:
        secret = (await gateway.make_key('alice')).secret
        with tracing_to(tmp_path / 'spans'):
            async with httpx.AsyncClient(base_url=f'http://{gateway.http_address}') as client:
                headers = {'authorization': f'Bearer {secret}'}
                assert (await client.get('/v1/models', headers=headers)).status_code == 503
                refused = await client.post('/v1/completions', headers=headers, json=['not an object'])
                assert 400 <= refused.status_code < 500
                assert (await client.get('/v1/models')).status_code == 401
    spans = [span for span in read_spans(tmp_path / 'spans') if 'http.route' in span.attributes]
    assert [_facts(span) for span in sorted(spans, key=lambda span: span.start_ns)] == [
        ('GET', '/v1/models', '503', True),
        ('POST', '/v1/completions', str(refused.status_code), False),
    ]


def _facts(span: SpanRecord) -> tuple[str, str, str, bool]:
    names = ('http.request.method', 'http.route', 'http.response.status_code')
    method, route, status = (span.attributes[name] for name in names)
    return method, route, status, span.is_error
