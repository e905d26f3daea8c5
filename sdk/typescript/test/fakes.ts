// A clock that does not wait, and errors as the services send them.
import { create } from '@bufbuild/protobuf';
import { Code, ConnectError, createRouterTransport, type ServiceImpl } from '@connectrpc/connect';
import type { DescService } from '@bufbuild/protobuf';
import type { Clock } from '../src/backoff.js';
import { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema } from '../src/gen/google/rpc/error_details_pb.js';
import { type CallSettings, CallTransport } from '../src/transport.js';

/** Advances by the times that callers sleep. */
export class FakeClock implements Clock {
  time = 0;
  readonly pauses: number[] = [];

  now(): number {
    return this.time;
  }

  sleep(milliseconds: number, signal: AbortSignal | undefined): Promise<void> {
    signal?.throwIfAborted();
    this.pauses.push(milliseconds);
    this.time += milliseconds;
    return Promise.resolve();
  }
}

export interface Refusal {
  reason?: string;
  disposition?: string;
  field?: string;
  retrySeconds?: bigint;
  requestId?: string;
}

/** Returns an error with the details that a service adds. */
export function refusal(code: Code, text: string, facts: Refusal = {}): ConnectError {
  const { reason = 'SOME_REASON', disposition, field, retrySeconds, requestId } = facts;
  const metadata = { adapterId: 'ad-1', ...(disposition && { disposition }) };
  return new ConnectError(text, code, requestId ? { 'x-request-id': requestId } : undefined, [
    { desc: ErrorInfoSchema, value: create(ErrorInfoSchema, { reason, metadata }) },
    ...(field === undefined
      ? []
      : [{ desc: BadRequestSchema, value: { fieldViolations: [{ field, description: 'must be positive' }] } }]),
    ...(retrySeconds === undefined
      ? []
      : [{ desc: RetryInfoSchema, value: { retryDelay: { seconds: retrySeconds, nanos: 500_000_000 } } }]),
  ]);
}

export interface Setting {
  clock: FakeClock;
  transport: CallTransport;
  retries: string[];
}

/** Returns a transport to an implementation of one service within the process. */
export function setting<S extends DescService>(
  service: S,
  methods: Partial<ServiceImpl<S>>,
  changes: Partial<CallSettings> = {},
): Setting {
  const clock = new FakeClock();
  const retries: string[] = [];
  const base = createRouterTransport(({ service: add }) => add(service, methods));
  const transport = new CallTransport(base, {
    apiKey: 'tml-key',
    timeoutMs: undefined,
    retryTimeoutMs: 20_000,
    clock,
    onRetry: ({ error }) => retries.push(error.reason),
    ...changes,
  });
  return { clock, transport, retries };
}
