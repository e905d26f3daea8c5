"""Tests of the client's `Traces`, with a gateway that has a folder of traces."""

import asyncio
from datetime import timedelta
from pathlib import Path

import pytest

from fixtures.running_gateway import ADMIN_KEY, running_gateway
from fixtures.span_folder import call_of, trace_id, write_spans
from twinkle_client import NotFoundError, TwinkleClient, UsageError
from twinkle_client.errors import NotSupportedError
from twinkle_client.traces import Traces


async def test_traces_are_listed_and_read(tmp_path: Path) -> None:
    """A list has the facts of the tenant's traces, and a read trace has the spans that the services wrote."""
    folder = tmp_path / 'traces'
    spans = call_of('default', trace=1, ms=25)
    others = call_of('bob', trace=2, at_ms=1)
    write_spans(folder / 'model.jsonl', [*spans, *others])
    async with running_gateway(tmp_path / 'state', telemetry={'trace_dir': folder}) as gateway:
        client = TwinkleClient(gateway.address, ADMIN_KEY)
        traces, everyone = Traces(client=client), Traces(are_all_tenants_shown=True, client=client)
        (found,) = await traces.list.aio(run_id='ad-1', sequence_number=1, min_duration=timedelta(milliseconds=25))
        assert (found.trace_id, found.span_count, found.duration) == (trace_id(1), 4, timedelta(milliseconds=25))
        assert (found.verbs, found.request_ids, found.tenant_ids) == (['ForwardBackward'], ['rq-1'], [])
        assert await traces.list.aio(min_duration=timedelta(milliseconds=26)) == []
        assert [trace.tenant_ids for trace in await everyone.list.aio(limit=1)] == [['bob']]
        assert await traces.get.aio(trace_id(1)) == spans
        assert await everyone.get.aio(trace_id(2)) == others
        with pytest.raises(NotFoundError):
            await traces.get.aio(trace_id(2))
        with pytest.raises(UsageError, match='trace_id'):
            await traces.get.aio('7')
        await asyncio.to_thread(client.close)


async def test_a_server_without_a_folder_is_an_error(tmp_path: Path) -> None:
    """The error of a server without a folder of traces names the setting."""
    async with running_gateway(tmp_path) as gateway:
        client = TwinkleClient(gateway.address, ADMIN_KEY)
        with pytest.raises(NotSupportedError, match=r'telemetry\.trace_dir'):
            await Traces(client=client).list.aio()
        await asyncio.to_thread(client.close)
