// Conversion of spans to Chrome's trace event format, which Perfetto opens. `twinkle.telemetry.trace_events` has the same
// conversion; both are tested with tests/fixtures/trace_events.json.
import { type Span, SpanKind } from 'twinkle-grpc/api/gateway/v1/trace_service_pb';
import { lower } from './format';
import { nanoseconds, SERVICES, shortName } from './spans';

interface TraceEvent {
  ph: string;
  name: string;
  pid: number;
  [key: string]: unknown;
}

export interface TraceFile {
  traceEvents: TraceEvent[];
  displayTimeUnit: 'ms';
  otherData: { begin_time_ns: string };
}

interface Place {
  pid: number;
  tid: number;
}

interface Timed {
  span: Span;
  traceId: string;
  begin: bigint;
  end: bigint;
}

/** Converts the spans of traces. Times are microseconds since the first span. */
export function traceEvents(traces: { traceId: string; spans: Span[] }[]): TraceFile {
  const timed = traces
    .flatMap(({ traceId, spans }) => spans.map((span) => ({ span, traceId, ...timesOf(span) })))
    .sort((a, b) => compare(a.begin, b.begin) || compare(b.end, a.end) || compare(keyOf(a), keyOf(b)));
  const origin = timed[0]?.begin ?? 0n;
  const services = [...new Set(timed.map(({ span }) => span.service))].sort(
    (a, b) => rank(a) - rank(b) || compare(a, b),
  );
  const processes = new Map(services.map((name, index) => [name, index + 1]));
  const threads = threadsOf(timed);
  const placeOf = (one: Timed): Place => ({
    pid: processes.get(one.span.service) ?? 0,
    tid: threads.get(keyOf(one)) ?? 0,
  });
  return {
    traceEvents: [
      ...services.map((name) => ({ ph: 'M', name: 'process_name', pid: processes.get(name) ?? 0, args: { name } })),
      ...timed.map((one) => eventOf(one, placeOf(one), origin)),
      ...arrowsOf(timed, origin, placeOf),
    ],
    displayTimeUnit: 'ms',
    otherData: { begin_time_ns: `${origin}` },
  };
}

const timesOf = (span: Span): { begin: bigint; end: bigint } => ({
  begin: nanoseconds(span.startTime),
  end: nanoseconds(span.endTime),
});

const compare = <T extends bigint | string>(a: T, b: T): number => (a < b ? -1 : a > b ? 1 : 0);

const rank = (service: string): number => (SERVICES.indexOf(service) + SERVICES.length + 1) % (SERVICES.length + 1);

const keyOf = ({ traceId, span }: Timed): string => `${traceId}:${span.spanId}`;

const microseconds = (nanos: bigint): number => Number(nanos) / 1000;

/** Thread of each span: the parent's if the parent is the innermost open span, or else one without an open span. */
function threadsOf(timed: Timed[]): Map<string, number> {
  const services = new Map<string, Timed[][]>();
  const found = new Map<string, number>();
  for (const one of timed) {
    const threads = services.get(one.span.service) ?? [];
    services.set(one.span.service, threads);
    for (const opened of threads) {
      while (opened.length && (opened.at(-1) as Timed).end <= one.begin) {
        opened.pop();
      }
    }
    let index = threads.findIndex((opened) => opened.length && contains(opened.at(-1) as Timed, one));
    index = index < 0 ? threads.findIndex((opened) => !opened.length) : index;
    index = index < 0 ? threads.push([]) - 1 : index;
    threads[index]?.push(one);
    found.set(keyOf(one), index + 1);
  }
  return found;
}

const contains = (parent: Timed, { traceId, span, end }: Timed): boolean =>
  keyOf(parent) === `${traceId}:${span.parentSpanId}` && end <= parent.end;

function eventOf({ span, traceId, begin, end }: Timed, place: Place, origin: bigint): TraceEvent {
  const links = span.links.map((link) => `${link.traceId}:${link.spanId}`);
  return {
    ph: 'X',
    name: shortName(span.name),
    cat: lower(SpanKind[span.kind]),
    ts: microseconds(begin - origin),
    dur: microseconds(end - begin),
    ...place,
    args: {
      trace_id: traceId,
      span_id: span.spanId,
      ...span.attributes,
      ...(span.isError ? { is_error: true } : {}),
      ...(links.length ? { links } : {}),
    },
  };
}

/** Two events for each span whose parent is in another service. */
function arrowsOf(timed: Timed[], origin: bigint, placeOf: (one: Timed) => Place): TraceEvent[] {
  const spans = new Map(timed.map((one) => [keyOf(one), one]));
  return timed.flatMap((one, id) => {
    const parent = spans.get(`${one.traceId}:${one.span.parentSpanId}`);
    if (!parent || parent.span.service === one.span.service) {
      return [];
    }
    return [parent, one].map((end) => {
      // An arrow begins inside the parent, and ends where the child begins.
      const inside = one.begin > end.begin ? one.begin : end.begin;
      const time = inside < end.end ? inside : end.end;
      const phase = end === one ? { ph: 'f', bp: 'e' } : { ph: 's' };
      return {
        name: 'call',
        cat: 'call',
        id,
        ts: microseconds(time - origin),
        ...placeOf(end),
        ...phase,
      };
    });
  });
}
