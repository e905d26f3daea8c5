// The package against a running stack. The environment names the server, a key and the base model.
import { ConnectError } from '@connectrpc/connect';
import { afterEach, expect, test } from 'vitest';
import { ServerService } from '../src/gen/twinkle/api/server/v1/server_service_pb.js';
import { AdapterService } from '../src/gen/twinkle/api/model/v1/adapter_service_pb.js';
import { TrainingService } from '../src/gen/twinkle/api/model/v1/training_service_pb.js';
import type { OperationResult } from '../src/gen/twinkle/api/model/v1/operation_result_pb.js';
import type { SampleResponse } from '../src/gen/twinkle/api/sampler/v1/sampler_service_pb.js';
import { SamplerService } from '../src/gen/twinkle/api/sampler/v1/sampler_service_pb.js';
import { StopReason } from '../src/gen/twinkle/api/sampler/v1/sampling_pb.js';
import {
  AccessError,
  CancelledError,
  type ClientOptions,
  Code,
  DeadlineError,
  elements,
  errorFromStatus,
  int32Tensor,
  type Interceptor,
  NotFoundError,
  type SampleInit,
  supervisedBatch,
  TwinkleClient,
  TwinkleError,
  UsageError,
} from '../src/index.js';
import { connect as connectWeb } from '../src/platform/web.js';
import { Proxy } from './proxy.js';

const baseModel = process.env['TWINKLE_MODEL'] ?? '';
const closers: (() => void)[] = [];
afterEach(() => {
  closers.splice(0).forEach((close) => close());
});

function opened(options: ClientOptions = {}): TwinkleClient {
  const client = new TwinkleClient(options);
  closers.push(() => client.close());
  return client;
}

const prompt: SampleInit = {
  baseModel,
  prompt: { content: { case: 'tokenIds', value: int32Tensor([5, 6, 7]) } },
  params: { maxTokens: 40, temperature: 1, seed: 11n, sampleCount: 2, isEosIgnored: true },
};
const batch = {
  source: { case: 'features', value: supervisedBatch([{ tokenIds: [3, 4, 5, 6, 7, 8], promptLength: 2 }]) },
} as const;

async function failureOf(call: Promise<unknown>): Promise<TwinkleError> {
  const reason: unknown = await call.then(
    () => expect.unreachable('the call succeeded'),
    (error: unknown) => error,
  );
  if (!(reason instanceof TwinkleError)) {
    throw reason;
  }
  return reason;
}

const stepOf = (result: OperationResult): bigint | undefined =>
  result.outcome.case === 'step' ? result.outcome.value.stepCount : undefined;

test('a unary call returns a typed message', async () => {
  const info = await opened().service(ServerService).getServerInfo({});
  expect(info.services.map(({ service }) => service)).toContain('sampler');
});

test('a stream delivers the prompt, tokens and one end for each sequence', async () => {
  const events: SampleResponse[] = [];
  for await (const response of opened().sample(prompt)) {
    events.push(response);
  }
  expect(events[0]?.event.case).toBe('prompt');
  expect(events.filter(({ event }) => event.case === 'finished')).toHaveLength(2);
  const counts = events.map(({ event }) => (event.case === 'delta' ? elements(event.value.tokenIds).length : 0));
  expect(counts.reduce((sum, count) => sum + count)).toBe(80);
});

test('a stream continues after its connection is lost', async () => {
  const expected = await opened().complete(prompt);
  expect(expected.map(({ stopReason }) => stopReason)).toEqual([StopReason.LENGTH, StopReason.LENGTH]);
  const proxy = new Proxy(process.env['TWINKLE_SERVER_URL'] ?? '');
  closers.push(() => proxy.stop());
  const client = opened({ address: await proxy.start() });
  await client.service(ServerService).getServerInfo({});
  for (const byteCount of [1_000, 2_000, 3_000]) {
    proxy.cutAfter(byteCount);
    expect(await client.complete(prompt)).toEqual(expected);
  }
  expect(proxy.cutCount).toBe(3);
});

test('a training step is applied once if its response is lost', async () => {
  const lost: string[] = [];
  const losing: Interceptor = (next) => async (request) => {
    const response = await next(request);
    if (request.method.name === 'Execute' && lost.length < 1) {
      lost.push(request.header.get('x-request-id') ?? '');
      throw new ConnectError('the connection is lost', Code.Unavailable);
    }
    return response;
  };
  const whole = await opened().createAdapter({ baseModel, loraConfig: { loraRank: 4, seed: 3n } });
  await whole.run('forwardBackward', { batch });
  const undisturbed = await whole.run('clipGradAndStep', {});
  const adapter = await opened().createAdapter({ baseModel, loraConfig: { loraRank: 4, seed: 3n } });
  await adapter.run('forwardBackward', { batch });

  const disturbed = opened({ interceptors: [losing] });
  const continued = await disturbed.openAdapter(adapter.adapterId);
  const step = await continued.run('clipGradAndStep', {});
  expect(lost).toHaveLength(1);
  expect(step.isReplayed).toBe(true);
  expect(stepOf(step)).toBe(1n);
  expect(step.outcome.value).toEqual(undisturbed.outcome.value);
  expect(continued.lastNumber).toBe(2n);
  const { adapter: state } = await disturbed.service(AdapterService).getAdapter({ adapterId: adapter.adapterId });
  expect([state?.stepCount, state?.sequenceNumber]).toEqual([1n, 2n]);
});

test('operations that start together run in order', async () => {
  const adapter = await opened().createAdapter({ baseModel, loraConfig: { loraRank: 4 } });
  const results = await Promise.all(
    Array.from({ length: 3 }, () => [
      adapter.run('forwardBackward', { batch }),
      adapter.run('clipGradAndStep', {}),
    ]).flat(),
  );
  expect(results.map(({ sequenceNumber }) => sequenceNumber)).toEqual([1n, 2n, 3n, 4n, 5n, 6n]);
  expect(results.map(stepOf)).toEqual([undefined, 1n, undefined, 2n, undefined, 3n]);
});

test('a refused operation leaves its number free', async () => {
  const client = opened();
  const adapter = await client.createAdapter({ baseModel, loraConfig: { loraRank: 4 } });
  const error = await failureOf(adapter.run('forwardBackward', { batch, options: { temperature: -1 } }));
  expect(error).toBeInstanceOf(UsageError);
  expect(error.reason).toBe('INVALID_FIELD');
  expect(error.disposition).toBe('REFUSED');
  expect(error.message).toContain('temperature');
  expect(error.violations[0]?.field).toContain('temperature');
  expect(error.requestId).toMatch(/^rq-/);
  expect((await adapter.run('forwardBackward', { batch })).sequenceNumber).toBe(1n);
});

test('errors name the resource or the credentials', async () => {
  const missing = await failureOf(opened().openAdapter('absent'));
  expect(missing).toBeInstanceOf(NotFoundError);
  expect(missing.metadata).toMatchObject({ adapterId: 'absent' });
  const refused = await failureOf(opened({ apiKey: 'tml-wrong' }).openAdapter('absent'));
  expect(refused).toBeInstanceOf(AccessError);
  expect(refused.code).toBe(Code.Unauthenticated);
});

test('a failed operation is described in its record', async () => {
  const client = opened();
  const adapter = await client.createAdapter({ baseModel, loraConfig: { loraRank: 4 } });
  const error = await failureOf(adapter.run('undo', { stepCount: 5 }));
  const { adapterId } = adapter;
  const { result } = await client.service(TrainingService).getOperation({ adapterId, sequenceNumber: 1n });
  expect(result?.outcome.case).toBe('error');
  if (result?.outcome.case === 'error') {
    const recorded = errorFromStatus(result.outcome.value);
    expect(recorded).toBeInstanceOf(error.constructor);
    expect([recorded.reason, recorded.disposition]).toEqual([error.reason, 'FAILED']);
  }
});

test('a deadline ends a call', async () => {
  const client = opened({ timeoutMs: 1 });
  expect(await failureOf(client.createAdapter({ baseModel, loraConfig: { loraRank: 4 } }))).toBeInstanceOf(
    DeadlineError,
  );
});

test('leaving the loop and a signal cancel a stream', async () => {
  const client = opened();
  const endless: SampleInit = { ...prompt, params: { ...prompt.params, maxTokens: 100, sampleCount: 16 } };
  for await (const { event } of client.sample(endless)) {
    if (event.case === 'delta') {
      break;
    }
  }
  const control = new AbortController();
  const reading = async (): Promise<void> => {
    for await (const { event } of client.sample(endless, { signal: control.signal })) {
      if (event.case === 'delta') {
        control.abort();
      }
    }
  };
  expect(await failureOf(reading())).toBeInstanceOf(CancelledError);
  await expect
    .poll(async () => (await client.service(SamplerService).getLoad({})).load?.runningSequenceCount, {
      timeout: 30_000,
    })
    .toBe(0);
});

test('the transport of browsers calls the same methods', async () => {
  const { transport } = connectWeb({ address: process.env['TWINKLE_HTTP_URL'] ?? '', ca: '', interceptors: [] });
  const client = opened({ transport });
  expect(await client.complete(prompt)).toEqual(await opened().complete(prompt));
  const error = await failureOf(client.openAdapter('absent'));
  expect(error).toBeInstanceOf(NotFoundError);
  expect(error.reason).toBe('ADAPTER_NOT_FOUND');
});
