// Reading of traces, and the filters of their list.
import type { GetTraceResponse, ListTracesResponse } from 'twinkle-grpc/api/gateway/v1/trace_service_pb';
import { ApiError } from './failure';
import type { Values } from './hash';
import { traces } from './rpc';
import { type TraceFile, traceEvents } from './traceEvents';

export interface TraceFilter {
  requestId: string;
  run: string;
  /** Number of an operation of the run. Empty for all. */
  operation: string;
  /** Least duration in milliseconds, as the user wrote it. */
  minimum: string;
  onlyErrors: boolean;
  hasBackground: boolean;
  isAllTenants: boolean;
}

export const NO_FILTER: TraceFilter = {
  requestId: '',
  run: '',
  operation: '',
  minimum: '',
  onlyErrors: false,
  hasBackground: false,
  isAllTenants: false,
};

export const filterOf = (query: URLSearchParams): TraceFilter => ({
  requestId: query.get('request') ?? '',
  run: query.get('run') ?? '',
  operation: query.get('operation') ?? '',
  minimum: query.get('minimum') ?? '',
  onlyErrors: query.get('errors') === 'true',
  hasBackground: query.get('background') === 'true',
  isAllTenants: query.get('tenants') === 'all',
});

export const queryOf = (filter: TraceFilter): Values => ({
  request: filter.requestId,
  run: filter.run,
  operation: filter.operation,
  minimum: filter.minimum,
  errors: filter.onlyErrors ? 'true' : '',
  background: filter.hasBackground ? 'true' : '',
  tenants: filter.isAllTenants ? 'all' : '',
});

const MAX_MS = 1e12;

/** A number that the user wrote, if it is valid. */
function numberOf(text: string): number {
  const value = Number(text);
  return Number.isFinite(value) ? Math.min(Math.max(value, 0), MAX_MS) : 0;
}

const PAGE_SIZE = 50;

/** Fields of the request for a page of the list. */
export function requestOf(filter: TraceFilter, pageToken: string) {
  const minimum = numberOf(filter.minimum);
  const [run, operation] = [filter.run.trim(), Math.floor(numberOf(filter.operation))];
  return {
    pageSize: PAGE_SIZE,
    pageToken,
    requestId: filter.requestId.trim(),
    runId: run,
    sequenceNumber: run ? BigInt(operation) : 0n,
    minDuration: minimum
      ? { seconds: BigInt(Math.floor(minimum / 1000)), nanos: Math.round((minimum % 1000) * 1e6) }
      : undefined,
    isError: filter.onlyErrors || undefined,
    // A request id selects one call, which may be a background call.
    isBackgroundIncluded: filter.hasBackground || filter.requestId.trim() !== '',
    isAllTenants: filter.isAllTenants,
  };
}

export const listTraces = (filter: TraceFilter, pageToken: string, signal: AbortSignal): Promise<ListTracesResponse> =>
  traces.listTraces(requestOf(filter, pageToken), { signal });

export const eventsOf = ({ trace, spans }: GetTraceResponse): TraceFile =>
  traceEvents([{ traceId: trace?.traceId ?? '', spans }]);

const AT_ONCE = 4;

/** Reads the newest traces of a run, and converts them together. */
export async function runEvents(runId: string): Promise<TraceFile> {
  const { traces: found } = await traces.listTraces(requestOf({ ...NO_FILTER, run: runId }, ''));
  if (!found.length) {
    throw new ApiError(404, 'No trace of this run is stored.', 'TRACE_NOT_FOUND', '', '');
  }
  const read: GetTraceResponse[] = [];
  for (let begin = 0; begin < found.length; begin += AT_ONCE) {
    const part = found.slice(begin, begin + AT_ONCE).map(({ traceId }) => traces.getTrace({ traceId }));
    read.push(...(await Promise.all(part)));
  }
  return traceEvents(read.map(({ trace, spans }) => ({ traceId: trace?.traceId ?? '', spans })));
}
