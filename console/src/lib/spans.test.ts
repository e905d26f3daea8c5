import { create } from '@bufbuild/protobuf';
import { expect, test } from 'vitest';
import { type Span, SpanKind, SpanSchema } from 'twinkle-grpc/api/gateway/v1/trace_service_pb';
import { duration, inOrder, labelOf, rowsOf, slotOf, ticks } from './spans';

const span = (spanId: string, parentSpanId: string, begin: number, end: number): Span =>
  create(SpanSchema, {
    spanId,
    parentSpanId,
    startTime: { seconds: 1_700_000_000n, nanos: begin * 1000 },
    endTime: { seconds: 1_700_000_000n, nanos: end * 1000 },
  });

test('children follow their parents, and siblings are ordered by time', () => {
  const spans = [span('c', 'a', 20, 90), span('b', 'a', 10, 95), span('d', 'c', 30, 40), span('a', '', 0, 100)];
  const rows = rowsOf(spans);
  expect(rows.map(({ span: { spanId }, depth, parent }) => [spanId, depth, parent])).toEqual([
    ['a', 0, -1],
    ['b', 1, 0],
    ['c', 1, 0],
    ['d', 2, 2],
  ]);
  expect(rows[3]).toMatchObject({ begin: 0.03, milliseconds: 0.01 });
});

test('a span whose parent is missing is a root', () => {
  expect(rowsOf([span('b', 'missing', 5, 9), span('a', '', 0, 3)]).map(({ depth, begin }) => [depth, begin])).toEqual([
    [0, 0],
    [0, 0.005],
  ]);
});

test('no spans are no rows', () => {
  expect(rowsOf([])).toEqual([]);
});

test('names of methods are short, and calls have an arrow', () => {
  const name = 'twinkle.api.model.v1.TrainingService/Execute';
  expect(labelOf(create(SpanSchema, { name, kind: SpanKind.CLIENT }))).toBe('TrainingService/Execute →');
  expect(labelOf(create(SpanSchema, { name: 'console.rpc', kind: SpanKind.SERVER }))).toBe('console.rpc');
});

test('durations have three digits and a unit', () => {
  expect([0.00123, 0.25, 14.24, 999, 1250, 61_000, 150_000].map(duration)).toEqual([
    '0.00123 ms',
    '0.25 ms',
    '14.2 ms',
    '999 ms',
    '1.25 s',
    '61 s',
    '2 min 30 s',
  ]);
});

test('marks of an axis have round values up to its end', () => {
  expect(ticks(100)).toEqual([0, 20, 40, 60, 80, 100]);
  expect(ticks(7.4)).toEqual([0, 2, 4, 6]);
  expect(ticks(0)).toEqual([0]);
  for (const total of [0.037, 1, 12, 59, 3601, 1e7]) {
    const marks = ticks(total);
    expect(marks.length).toBeGreaterThan(2);
    expect(marks.length).toBeLessThan(8);
    expect(marks.at(-1)).toBeLessThanOrEqual(total * (1 + 1e-9));
  }
});

test('services have different colours', () => {
  const slots = ['client', 'gateway', 'model', 'sampler', 'data', 'checkpoint', 'other'].map(slotOf);
  expect(new Set(slots).size).toBe(7);
  expect(inOrder(['checkpoint', 'client', 'model', 'gateway'])).toEqual(['client', 'gateway', 'model', 'checkpoint']);
});
