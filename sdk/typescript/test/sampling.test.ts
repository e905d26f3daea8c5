import type { MessageInitShape } from '@bufbuild/protobuf';
import { Code, createClient } from '@connectrpc/connect';
import { expect, test } from 'vitest';
import { NotFoundError, RetryableError } from '../src/errors.js';
import {
  type SampleRequest,
  type SampleResponse,
  type SampleResponseSchema,
  SamplerService,
} from '../src/gen/twinkle/api/sampler/v1/sampler_service_pb.js';
import { StopReason } from '../src/gen/twinkle/api/sampler/v1/sampling_pb.js';
import { collected, continuedSample, type SampleInit } from '../src/sampling.js';
import { elements, float32Tensor, int32Tensor } from '../src/tensors.js';
import { refusal, setting } from './fakes.js';

type Event = MessageInitShape<typeof SampleResponseSchema>;
const PROMPT = [5, 6, 7];
const LENGTH = 4;

const delta = (sequenceIndex: number, position: number): Event => ({
  event: {
    case: 'delta',
    value: {
      sequenceIndex,
      tokenIds: int32Tensor([100 * sequenceIndex + position]),
      logprobs: float32Tensor([-0.5]),
      text: `${position}`,
      version: 3n,
    },
  },
});

/** Yields the events of a request, and only the remaining ones of a continued request. */
function* answer(request: SampleRequest): Generator<Event> {
  const count = request.params?.sampleCount ?? 1;
  if (!request.continued.length) {
    yield { event: { case: 'prompt', value: { tokenIds: int32Tensor(PROMPT) } } };
  }
  const begins = Array.from({ length: count }, (_, index) => elements(request.continued[index]?.tokenIds).length);
  for (let position = 0; position < (request.params?.maxTokens ?? LENGTH); position += 1) {
    for (const [index, begin] of begins.entries()) {
      if (position >= begin) {
        yield delta(index, position);
      }
    }
  }
  for (let index = 0; index < count; index += 1) {
    if (!request.continued[index]?.isFinished) {
      yield { event: { case: 'finished', value: { sequenceIndex: index, stopReason: StopReason.LENGTH } } };
    }
  }
}

/** Samples while each connection is lost after a number of events; the last one is not lost. */
function sampled(init: SampleInit, lostAfter: number[], code = Code.Unavailable) {
  const requests: SampleRequest[] = [];
  const { transport } = setting(SamplerService, {
    sample: async function* (request) {
      requests.push(request);
      let remaining = lostAfter[requests.length - 1] ?? Infinity;
      for (const event of answer(request)) {
        if (remaining === 0) {
          throw refusal(code, 'lost');
        }
        remaining -= 1;
        yield event;
      }
    },
  });
  return { requests, events: continuedSample(createClient(SamplerService, transport), init) };
}

async function listed(events: AsyncIterable<SampleResponse>): Promise<SampleResponse[]> {
  const found: SampleResponse[] = [];
  for await (const event of events) {
    found.push(event);
  }
  return found;
}

const LATEST: SampleInit = {
  requestId: 'mine',
  baseModel: 'tiny',
  adapter: { adapterId: 'ad-1', waitTimeout: { seconds: 4n } },
  prompt: { content: { case: 'text', value: 'Why?' } },
  params: { sampleCount: 2, seed: 7n },
};

test('a stream that is lost anywhere delivers each event once', async () => {
  const whole = await listed(sampled(LATEST, []).events);
  expect(whole).toHaveLength(1 + 2 * LENGTH + 2);
  for (let end = 1; end < whole.length; end += 1) {
    const { events, requests } = sampled(LATEST, [end, 1]);
    expect(await listed(events)).toEqual(whole);
    expect(requests.length).toBeGreaterThan(1);
  }
});

test('a continuation has the tokens, the version and another id', async () => {
  const { events, requests } = sampled(LATEST, [4]);
  await listed(events);
  const [first, second] = requests;
  expect(first?.requestId).toBe('mine');
  expect(first?.prompt?.content.case).toBe('text');
  expect(second?.requestId).toMatch(/^sm-[\da-f]{32}$/);
  expect(second?.prompt?.content).toMatchObject({ case: 'tokenIds', value: int32Tensor(PROMPT) });
  expect(second?.adapter?.version).toEqual({ case: 'exact', value: 3n });
  expect(second?.adapter?.waitTimeout?.seconds).toBe(4n);
  expect(second?.params?.seed).toBe(7n);
  expect(second?.continued.map(({ tokenIds, isFinished }) => [elements(tokenIds), isFinished])).toEqual([
    [[0, 1], false],
    [[100], false],
  ]);
});

test('a stream that is lost before its first token starts again', async () => {
  const { events, requests } = sampled(LATEST, [1]);
  const received = await listed(events);
  expect(received.filter(({ event }) => event.case === 'prompt')).toHaveLength(1);
  expect(requests[1]?.continued).toEqual([]);
  expect(requests[1]?.adapter?.version.case).toBeUndefined();
});

test('a request for a checkpoint is not continued', async () => {
  const version = { case: 'checkpointPath', value: 'twinkle://r/weights/a' } as const;
  const { events, requests } = sampled({ ...LATEST, adapter: { version } }, [3]);
  await expect(listed(events)).rejects.toThrow(RetryableError);
  expect(requests).toHaveLength(1);
});

const PROMPT_RESULTS: [string, NonNullable<SampleInit['params']>][] = [
  ['structured output', { structuredOutput: { form: { case: 'isJsonObject', value: true } } }],
  ['log-probabilities of the prompt', { isPromptLogprobsReturned: true }],
  ['top log-probabilities of the prompt', { promptTopLogprobCount: 2 }],
  ['a prompt probe', { promptProbe: { isEmbeddingReturned: true } }],
];

test.each(PROMPT_RESULTS)('a request with %s is repeated only before its first token', async (_, params) => {
  const { events, requests } = sampled({ ...LATEST, params }, [1, 3]);
  await expect(listed(events)).rejects.toThrow(RetryableError);
  expect(requests).toHaveLength(2);
});

test('a request is continued after at most 4096 tokens', async () => {
  const init: SampleInit = { ...LATEST, params: { maxTokens: 4100 } };
  const { events, requests } = sampled(init, [1 + 4096]);
  expect(await listed(events)).toHaveLength(1 + 4100 + 1);
  expect(requests).toHaveLength(2);
  const late = sampled(init, [1 + 4097]);
  await expect(listed(late.events)).rejects.toThrow(RetryableError);
  expect(late.requests).toHaveLength(1);
});

test('a refusal in the middle of a stream is thrown', async () => {
  const { events, requests } = sampled(LATEST, [3], Code.NotFound);
  await expect(listed(events)).rejects.toThrow(NotFoundError);
  expect(requests).toHaveLength(1);
});

test('completions have the text and the numbers of all their deltas', async () => {
  const completions = await collected(sampled(LATEST, [4, 3]).events);
  expect(completions).toEqual(
    [0, 1].map((index) => ({
      text: '0123',
      tokenIds: [0, 1, 2, 3].map((position) => 100 * index + position),
      logprobs: [-0.5, -0.5, -0.5, -0.5],
      stopReason: StopReason.LENGTH,
      versionSpans: [],
    })),
  );
});
