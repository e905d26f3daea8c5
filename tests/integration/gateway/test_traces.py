"""Tests of `TraceService` over loopback, with files of spans and with the gateway's own spans."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from fixtures.gateway_upstream import wait_until
from fixtures.running_gateway import ADMIN, RunningGateway, bearer, failure_of, running_gateway
from fixtures.span_folder import call_of, span, trace_id, write_spans
from twinkle.api.gateway.v1 import catalogue_service_pb2, catalogue_service_pb2_grpc, trace_service_pb2_grpc
from twinkle.api.gateway.v1 import trace_service_pb2 as messages
from twinkle.api.gateway.v1.key_service_pb2 import SCOPE_SAMPLE
from twinkle_client.tracing import tracing_to


def stub_of(gateway: RunningGateway) -> Any:
    return trace_service_pb2_grpc.TraceServiceStub(gateway.channel)


def reading(folder: Path) -> dict[str, Any]:
    """Return the configuration of a gateway that reads traces from a folder."""
    return {'telemetry': {'trace_dir': folder}}


async def numbers_of(gateway: RunningGateway, secret: str, **filters: Any) -> list[int]:
    """Return the numbers of the listed traces."""
    response = await stub_of(gateway).ListTraces(messages.ListTracesRequest(**filters), metadata=bearer(secret))
    return [int(trace.trace_id, 16) for trace in response.traces]


async def test_a_trace_is_listed_and_returned(tmp_path: Path) -> None:
    """A list has the main fields of a trace; a read trace has its spans with exact times, attributes and parents."""
    write_spans(tmp_path / 'model.jsonl', call_of('alice', trace=7, at_ms=0.5, ms=25))
    async with running_gateway(tmp_path / 'state', **reading(tmp_path)) as gateway:
        key = bearer((await gateway.make_key('alice', scopes=(SCOPE_SAMPLE,))).secret)
        listing = await stub_of(gateway).ListTraces(messages.ListTracesRequest(), metadata=key)
        (trace,) = listing.traces
        response = await stub_of(gateway).GetTrace(messages.GetTraceRequest(trace_id=trace_id(7)), metadata=key)
    assert response.trace == trace
    assert (trace.trace_id, trace.service, trace.span_count, trace.is_error) == (trace_id(7), 'client', 4, False)
    assert list(trace.services) == ['client', 'gateway', 'model']
    assert (list(trace.verbs), list(trace.run_ids), list(trace.request_ids)) == (
        ['ForwardBackward'],
        ['ad-1'],
        ['rq-7'],
    )
    assert trace.duration.ToTimedelta() == timedelta(milliseconds=25)
    assert not trace.tenant_ids
    assert not response.is_truncated
    root, call, _, operation = response.spans
    assert (root.kind, root.parent_span_id, call.parent_span_id) == (messages.SPAN_KIND_CLIENT, '', root.span_id)
    assert root.start_time.ToNanoseconds() == 1_700_000_000_000_500_000
    assert operation.end_time.ToNanoseconds() == 1_700_000_000_022_500_000
    assert operation.name == 'operation ForwardBackward'
    assert operation.attributes['twinkle.sequence_number'] == '7'


async def test_tenants_see_only_their_own_traces(tmp_path: Path) -> None:
    """Neither the list nor a read reveals another tenant's trace, or another tenant's spans of a shared trace."""
    others_link = [f'{trace_id(2)}:{24:016x}']
    shared_pass = span(
        15, parent=14, service='model', kind='internal', name='pass', links=others_link,
        attributes={'twinkle.adapter_count': '2', 'twinkle.token_count': '100'},
    )  # fmt: skip
    spans = [
        *call_of('alice', trace=1), shared_pass,
        *call_of('bob', trace=2, at_ms=1, run='ad-bob'),
        *call_of('alice', trace=3, at_ms=2), span(99, trace=3, tenant='bob', at_ms=2, request='rq-bob'),
        span(4, trace=4, at_ms=3, kind='internal', service='sampler', name='new version'),
    ]  # fmt: skip
    write_spans(tmp_path / 'model.jsonl', spans)
    async with running_gateway(tmp_path / 'state', **reading(tmp_path)) as gateway:
        alice, bob = [(await gateway.make_key(name, scopes=(1, 2, 3))).secret for name in ('alice', 'bob')]
        operator = (await gateway.make_key('ops')).secret
        stub = stub_of(gateway)
        assert await numbers_of(gateway, alice, is_background_included=True) == [3, 1]
        assert await numbers_of(gateway, bob, is_background_included=True) == [3, 2]
        assert await numbers_of(gateway, operator, is_background_included=True) == []
        everything = {'is_background_included': True, 'is_all_tenants': True}
        assert await numbers_of(gateway, operator, **everything) == [4, 3, 2, 1]
        request = messages.GetTraceRequest(trace_id=trace_id(2))
        failure = await failure_of(stub.GetTrace(request, metadata=bearer(alice)))
        assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, 'TRACE_NOT_FOUND')
        for call in (
            stub.ListTraces(messages.ListTracesRequest(is_all_tenants=True), metadata=bearer(alice)),
            stub.GetTrace(messages.GetTraceRequest(trace_id=trace_id(1), is_all_tenants=True), metadata=bearer(alice)),
        ):
            failure = await failure_of(call)
            assert (failure.code, failure.reason) == (grpc.StatusCode.PERMISSION_DENIED, 'SCOPE_MISSING')
        texts = [
            str(await stub.GetTrace(messages.GetTraceRequest(trace_id=trace_id(number)), metadata=bearer(alice)))
            for number in (1, 3)
        ]
        assert [word for word in ('bob', trace_id(2), 'token_count') if word in ''.join(texts)] == []
        assert 'adapter_count' in texts[0]
        whole = messages.GetTraceRequest(trace_id=trace_id(1), is_all_tenants=True)
        response = await stub.GetTrace(whole, metadata=bearer(operator))
        assert [link.trace_id for one in response.spans for link in one.links] == [trace_id(2)]
        assert list(response.trace.tenant_ids) == ['alice']


async def test_pages_of_a_query_continue(tmp_path: Path) -> None:
    """A page token continues its list, and is refused for another tenant and for another filter."""
    write_spans(tmp_path / 'm.jsonl', [one for n in range(1, 6) for one in call_of('alice', trace=n, at_ms=n)])
    async with running_gateway(tmp_path / 'state', **reading(tmp_path)) as gateway:
        alice = bearer((await gateway.make_key('alice')).secret)
        stub = stub_of(gateway)
        first = await stub.ListTraces(messages.ListTracesRequest(page_size=3), metadata=alice)
        token = first.next_page_token
        rest = await stub.ListTraces(messages.ListTracesRequest(page_size=3, page_token=token), metadata=alice)
        found = [int(trace.trace_id, 16) for trace in (*first.traces, *rest.traces)]
        assert (found, rest.next_page_token) == ([5, 4, 3, 2, 1], '')
        for filters, metadata in (({'run_id': 'ad-1'}, alice), ({'is_all_tenants': True}, alice), ({}, ADMIN)):
            request = messages.ListTracesRequest(page_token=token, **filters)
            failure = await failure_of(stub.ListTraces(request, metadata=metadata))
            assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, 'INVALID_PAGE_TOKEN')


@pytest.mark.parametrize(
    ('request_', 'field'),
    [
        (messages.ListTracesRequest(page_size=-1), 'page_size'),
        (messages.ListTracesRequest(request_id='x' * 257), 'request_id'),
        (messages.ListTracesRequest(request_id='\n'), 'request_id'),
        (messages.ListTracesRequest(run_id='x' * 257), 'run_id'),
        (messages.ListTracesRequest(sequence_number=-1, run_id='ad-1'), 'sequence_number'),
        (messages.ListTracesRequest(sequence_number=1), 'sequence_number'),
        (messages.ListTracesRequest(min_duration=Duration(seconds=-1)), 'min_duration'),
        (messages.ListTracesRequest(min_duration=Duration(seconds=2**60)), 'min_duration'),
        (messages.GetTraceRequest(), 'trace_id'),
        (messages.GetTraceRequest(trace_id='a' * 31), 'trace_id'),
        (messages.GetTraceRequest(trace_id='A' * 32), 'trace_id'),
        (messages.GetTraceRequest(trace_id='../' * 11), 'trace_id'),
    ],
)
async def test_invalid_requests_are_refused(tmp_path: Path, request_: Any, field: str) -> None:
    """The error for an invalid request names the field, even at a gateway without a folder of traces."""
    for options in ({}, reading(tmp_path)):
        async with running_gateway(tmp_path / 'state', **options) as gateway:
            stub = stub_of(gateway)
            method = stub.GetTrace if isinstance(request_, messages.GetTraceRequest) else stub.ListTraces
            failure = await failure_of(method(request_, metadata=ADMIN))
        assert (failure.code, failure.metadata['field']) == (grpc.StatusCode.INVALID_ARGUMENT, field)


async def test_a_gateway_without_a_folder_names_the_setting(tmp_path: Path) -> None:
    """The errors of a gateway without a folder of traces name the setting and another place for spans."""
    async with running_gateway(tmp_path) as gateway:
        for call in (
            stub_of(gateway).ListTraces(messages.ListTracesRequest(), metadata=ADMIN),
            stub_of(gateway).GetTrace(messages.GetTraceRequest(trace_id=trace_id(1)), metadata=ADMIN),
        ):
            failure = await failure_of(call)
            assert (failure.code, failure.reason) == (grpc.StatusCode.UNIMPLEMENTED, 'NOT_BUILT_YET')
            assert 'telemetry.trace_dir' in failure.message
            assert 'OTLP' in failure.message


async def test_damaged_files_do_not_fail_a_list(tmp_path: Path) -> None:
    """Lines that are not spans are skipped, and the other spans of their file are listed."""
    (tmp_path / 'gateway.jsonl').write_bytes(b'{"trace_id": 1}\n\xff\n' + b'x' * (1 << 21) + b'\n')
    write_spans(tmp_path / 'gateway.jsonl', call_of('default', trace=1))
    with (tmp_path / 'gateway.jsonl').open('ab') as file:
        file.write(b'{"trace_id": "')
    async with running_gateway(tmp_path / 'state', **reading(tmp_path)) as gateway:
        response = await stub_of(gateway).ListTraces(messages.ListTracesRequest(), metadata=ADMIN)
    assert [trace.trace_id for trace in response.traces] == [trace_id(1)]


async def test_calls_continue_while_a_large_folder_is_read(tmp_path: Path) -> None:
    """The event loop serves other calls while a first list reads many spans; a cancelled list has no effect."""
    for service in ('client', 'model', 'gateway'):
        spans = [span(n, trace=n, at_ms=n, tenant='default', service=service) for n in range(1, 20_001)]
        write_spans(tmp_path / f'{service}.jsonl', spans)
    async with running_gateway(tmp_path / 'state', **reading(tmp_path)) as gateway:
        catalogue: Any = catalogue_service_pb2_grpc.CatalogueServiceStub(gateway.channel)
        cancelled = stub_of(gateway).ListTraces(messages.ListTracesRequest(), metadata=ADMIN)
        listing = stub_of(gateway).ListTraces(messages.ListTracesRequest(page_size=1000), metadata=ADMIN)
        await catalogue.ListRuns(catalogue_service_pb2.ListRunsRequest(), metadata=ADMIN)
        assert not listing.done()
        cancelled.cancel()
        traces = (await listing).traces
    assert [int(trace.trace_id, 16) for trace in traces] == list(range(20_000, 19_000, -1))
    assert {trace.span_count for trace in traces} == {3}


async def test_the_trace_of_a_call_is_found_by_its_request_id(tmp_path: Path) -> None:
    """The spans that a gateway writes for a call appear, and can be found by the call's request id."""
    folder = tmp_path / 'traces'
    with tracing_to(folder):
        async with running_gateway(tmp_path / 'state', **reading(folder)) as gateway:
            catalogue: Any = catalogue_service_pb2_grpc.CatalogueServiceStub(gateway.channel)
            call = catalogue.ListRuns(catalogue_service_pb2.ListRunsRequest(), metadata=ADMIN)
            await call
            request_id = str(dict(await call.trailing_metadata())['x-request-id'])
            request = messages.ListTracesRequest(request_id=request_id, is_background_included=True)
            response = await wait_until(
                lambda: stub_of(gateway).ListTraces(request, metadata=ADMIN), lambda found: bool(found.traces)
            )
    (trace,) = response.traces
    assert trace.name == 'twinkle.api.gateway.v1.CatalogueService/ListRuns'
    assert list(trace.request_ids) == [request_id]
