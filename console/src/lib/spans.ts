// The spans of a trace as a tree of rows on a time axis.
import type { Timestamp } from '@bufbuild/protobuf/wkt';
import { type Span, SpanKind } from 'twinkle-grpc/api/gateway/v1/trace_service_pb';

export interface SpanRow {
  span: Span;
  /** Number of ancestors in the trace. */
  depth: number;
  /** Index of the parent's row, or -1 if the trace does not contain the parent. */
  parent: number;
  /** Milliseconds since the beginning of the trace. */
  begin: number;
  milliseconds: number;
}

export const nanoseconds = (time: Timestamp | undefined): bigint =>
  time ? time.seconds * 1_000_000_000n + BigInt(time.nanos) : 0n;

/** Rows of spans: each before its children, siblings by time. A span whose parent is missing is a root. */
export function rowsOf(spans: Span[]): SpanRow[] {
  const known = new Set(spans.map((span) => span.spanId));
  const children = new Map<string, Span[]>();
  const ordered = [...spans].sort((a, b) => Number(nanoseconds(a.startTime) - nanoseconds(b.startTime)));
  for (const span of ordered) {
    const parent = known.has(span.parentSpanId) ? span.parentSpanId : '';
    children.set(parent, [...(children.get(parent) ?? []), span]);
  }
  const origin = nanoseconds(ordered[0]?.startTime);
  const rows: SpanRow[] = [];
  const pending = (children.get('') ?? []).map((span) => ({ span, depth: 0, parent: -1 })).reverse();
  for (let next = pending.pop(); next; next = pending.pop()) {
    const { span, depth } = next;
    const begin = nanoseconds(span.startTime);
    const milliseconds = Number(nanoseconds(span.endTime) - begin) / 1e6;
    rows.push({ ...next, begin: Number(begin - origin) / 1e6, milliseconds });
    const parent = rows.length - 1;
    const below = (children.get(span.spanId) ?? []).map((child) => ({ span: child, depth: depth + 1, parent }));
    pending.push(...below.reverse());
  }
  return rows;
}

/** "TrainingService/Execute" for the full name of a method. Other names are unchanged. */
export const shortName = (name: string): string => (name.includes('/') ? name.slice(name.lastIndexOf('.') + 1) : name);

/** Name of a span, with an arrow for a call to another process. */
export const labelOf = ({ name, kind }: Span): string => shortName(name) + (kind === SpanKind.CLIENT ? ' →' : '');

/** A time with three digits: "0.25 ms", "14.2 ms", "1.25 s". */
export function duration(milliseconds: number): string {
  if (milliseconds < 1000) {
    return `${Number(milliseconds.toPrecision(3))} ms`;
  }
  return milliseconds < 120_000
    ? `${Number((milliseconds / 1000).toPrecision(3))} s`
    : `${Math.floor(milliseconds / 60_000)} min ${Math.round((milliseconds % 60_000) / 1000)} s`;
}

const MAX_TICKS = 6;

/** Marks of a time axis from 0 to `total` milliseconds, at equal distances. */
export function ticks(total: number): number[] {
  if (!(total > 0)) {
    return [0];
  }
  const power = 10 ** Math.floor(Math.log10(total / MAX_TICKS));
  const step = [1, 2, 5, 10].map((digit) => digit * power).find((size) => total / size <= MAX_TICKS) ?? total;
  return Array.from({ length: Math.floor(total / step + 1e-9) + 1 }, (_, index) => index * step);
}

export const SERVICES = ['client', 'gateway', 'model', 'sampler', 'data', 'checkpoint'];

/** Services in the order in which a call passes them. */
export const inOrder = (services: string[]): string[] => [...services].sort((a, b) => slotOf(a) - slotOf(b));

/** Number of the colour of a service. */
export const slotOf = (service: string): number => (SERVICES.indexOf(service) + 8) % 8;
