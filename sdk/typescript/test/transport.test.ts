import { Code, createClient } from '@connectrpc/connect';
import { expect, test } from 'vitest';
import { CancelledError, DeadlineError, NotFoundError, RetryableError } from '../src/errors.js';
import { CatalogueService } from '../src/gen/twinkle/api/gateway/v1/catalogue_service_pb.js';
import { SamplerService } from '../src/gen/twinkle/api/sampler/v1/sampler_service_pb.js';
import { refusal, setting } from './fakes.js';

test('a call is repeated with the same request id until it succeeds', async () => {
  const ids: (string | null)[] = [];
  const { transport, clock, retries } = setting(CatalogueService, {
    getRun: ({ runId }, { requestHeader }) => {
      ids.push(requestHeader.get('x-request-id'));
      expect(requestHeader.get('authorization')).toBe('Bearer tml-key');
      if (ids.length < 3) {
        throw refusal(Code.Unavailable, 'away', { reason: 'SERVICE_UNREACHABLE' });
      }
      return { run: { runId } };
    },
  });
  const { run } = await createClient(CatalogueService, transport).getRun({ runId: 'r-1' });
  expect(run?.runId).toBe('r-1');
  expect(new Set(ids).size).toBe(1);
  expect(ids[0]).toMatch(/^rq-[\da-f]{32}$/);
  expect(clock.pauses).toEqual([200, 400]);
  expect(retries).toEqual(['SERVICE_UNREACHABLE', 'SERVICE_UNREACHABLE']);
});

test('the delay that the server requests is respected', async () => {
  let count = 0;
  const { transport, clock } = setting(CatalogueService, {
    getRun: () => {
      count += 1;
      if (count === 1) {
        throw refusal(Code.ResourceExhausted, 'full', { retrySeconds: 3n });
      }
      return {};
    },
  });
  await createClient(CatalogueService, transport).getRun({});
  expect(clock.pauses).toEqual([3500]);
});

test('retries end after the retry time with the last error', async () => {
  let count = 0;
  const { transport, clock } = setting(CatalogueService, {
    getRun: () => {
      count += 1;
      throw refusal(Code.Unavailable, `away ${count}`);
    },
  });
  const failure = createClient(CatalogueService, transport).getRun({});
  await expect(failure).rejects.toThrow(RetryableError);
  await expect(failure).rejects.toThrow(`away ${count}`);
  expect(clock.pauses.slice(0, 6)).toEqual([200, 400, 800, 1600, 3200, 5000]);
  expect(clock.time).toBeGreaterThanOrEqual(20_000);
  expect(clock.time).toBeLessThan(25_000);
});

test('a call that waits for work in progress is repeated without a limit', async () => {
  let count = 0;
  const { transport, clock } = setting(CatalogueService, {
    getRun: () => {
      count += 1;
      clock.time += 8_000;
      if (count < 10) {
        throw refusal(Code.Unavailable, 'reading', { reason: 'POSITION_NOT_REACHED', retrySeconds: 0n });
      }
      return {};
    },
  });
  await createClient(CatalogueService, transport).getRun({});
  expect(clock.pauses).toEqual(Array(9).fill(500));
});

test.each([
  [Code.NotFound, undefined, NotFoundError],
  [Code.Unavailable, 'FAILED', RetryableError],
  [Code.DeadlineExceeded, 'INTERRUPTED', DeadlineError],
])('an error with code %i and disposition %s is not repeated', async (code, disposition, kind) => {
  let count = 0;
  const { transport } = setting(CatalogueService, {
    getRun: () => {
      count += 1;
      throw refusal(code, 'refused', disposition ? { disposition } : {});
    },
  });
  await expect(createClient(CatalogueService, transport).getRun({})).rejects.toThrow(kind);
  expect(count).toBe(1);
});

test('a retry time of 0 sends calls once', async () => {
  const failing = { getRun: () => Promise.reject(refusal(Code.Unavailable, 'away')) };
  const { transport, clock } = setting(CatalogueService, failing, { retryTimeoutMs: 0 });
  await expect(createClient(CatalogueService, transport).getRun({})).rejects.toThrow(RetryableError);
  expect(clock.pauses).toEqual([]);
});

test('a cancelled call does not wait for its next attempt', async () => {
  const control = new AbortController();
  const { transport, clock } = setting(
    CatalogueService,
    { getRun: () => Promise.reject(refusal(Code.Unavailable, 'away')) },
    { onRetry: () => control.abort() },
  );
  const call = createClient(CatalogueService, transport).getRun({}, { signal: control.signal });
  await expect(call).rejects.toThrow(CancelledError);
  expect(clock.pauses).toEqual([]);
});

test.each([
  ['getRun', undefined, 30_000],
  ['getRun', 250, 250],
] as const)('%s with the deadline %s has the deadline %i', async (name, timeoutMs, expected) => {
  let remaining = 0;
  const { transport } = setting(
    CatalogueService,
    {
      [name]: (_: unknown, context: { timeoutMs: () => number | undefined }) => {
        remaining = context.timeoutMs() ?? 0;
        return {};
      },
    },
    { timeoutMs },
  );
  await createClient(CatalogueService, transport)[name]({});
  expect(remaining).toBeGreaterThan(expected - 200);
  expect(remaining).toBeLessThanOrEqual(expected);
});

test('a stream is repeated before its first response only', async () => {
  let count = 0;
  const { transport, clock } = setting(SamplerService, {
    watchLoad: async function* () {
      count += 1;
      if (count < 3) {
        throw refusal(Code.Unavailable, 'away');
      }
      yield {};
      throw refusal(Code.Unavailable, 'lost');
    },
  });
  const received: unknown[] = [];
  const reading = (async () => {
    for await (const response of createClient(SamplerService, transport).watchLoad({})) {
      received.push(response);
    }
  })();
  await expect(reading).rejects.toThrow('lost');
  expect(received).toHaveLength(1);
  expect(count).toBe(3);
  expect(clock.pauses).toEqual([200, 400]);
});

test('a stream without responses ends', async () => {
  const { transport } = setting(SamplerService, { watchLoad: async function* () {} });
  for await (const response of createClient(SamplerService, transport).watchLoad({})) {
    expect.unreachable(`received ${response.$typeName}`);
  }
});
