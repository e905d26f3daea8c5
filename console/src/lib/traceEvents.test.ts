import { create } from '@bufbuild/protobuf';
import { expect, test } from 'vitest';
import example from '../../../tests/fixtures/trace_events.json';
import { type Span, SpanKind, SpanSchema } from 'twinkle-grpc/api/gateway/v1/trace_service_pb';
import { traceEvents } from './traceEvents';

const timestamp = (nanos: string) => ({
  seconds: BigInt(nanos) / 1_000_000_000n,
  nanos: Number(BigInt(nanos) % 1_000_000_000n),
});

type Line = (typeof example.spans)[number];

function spanOf(line: Line): Span {
  return create(SpanSchema, {
    spanId: line.span_id,
    parentSpanId: line.parent_id,
    service: line.service,
    name: line.name,
    kind: SpanKind[line.kind.toUpperCase() as keyof typeof SpanKind],
    startTime: timestamp(line.start_ns),
    endTime: timestamp(line.end_ns),
    isError: line.is_error,
    attributes: line.attributes as Record<string, string>,
    links: line.links.map((link) => ({ traceId: link.slice(0, 32), spanId: link.slice(33) })),
  });
}

test('the events of the example equal those that the command line writes', () => {
  const ids = [...new Set(example.spans.map((line) => line.trace_id))];
  const traces = ids.map((traceId) => ({
    traceId,
    spans: example.spans.filter((line) => line.trace_id === traceId).map(spanOf),
  }));
  const expected = JSON.parse(JSON.stringify(example.events)) as unknown;
  expect(JSON.parse(JSON.stringify(traceEvents(traces)))).toEqual(expected);
  expect(JSON.parse(JSON.stringify(traceEvents(traces.reverse())))).toEqual(expected);
});

test('the list of events is empty without traces', () => {
  expect(traceEvents([])).toEqual({ traceEvents: [], displayTimeUnit: 'ms', otherData: { begin_time_ns: '0' } });
});
