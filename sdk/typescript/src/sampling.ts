// Streams of samples that continue after a lost connection, and completions that are collected from them.
import { clone, create, type MessageInitShape } from '@bufbuild/protobuf';
import type { CallOptions, Client } from '@connectrpc/connect';
import { errorFrom } from './errors.js';
import {
  type SampleRequest,
  SampleRequestSchema,
  type SampleResponse,
  type SamplerService,
  SequenceSoFarSchema,
} from './gen/twinkle/api/sampler/v1/sampler_service_pb.js';
import {
  type PromptInfo,
  PromptSchema,
  StopReason,
  type VersionSpan,
} from './gen/twinkle/api/sampler/v1/sampling_pb.js';
import { newId } from './ids.js';
import { elements, int32Tensor } from './tensors.js';

/** Maximum number of delivered tokens with which the gateway continues a request, in all sequences together. */
const MAX_DELIVERED_TOKENS = 4096;

export type SampleInit = MessageInitShape<typeof SampleRequestSchema>;

/** One finished sequence of a prompt. */
export interface Completion {
  /** The new tokens as text, without special tokens and without the stop string. */
  readonly text: string;
  readonly tokenIds: readonly number[];
  /** Natural log-probability of each token under the model's distribution before temperature and filters. */
  readonly logprobs: readonly number[];
  readonly stopReason: StopReason;
  /** Versions that sampled the tokens, in order; 0 is the base model. */
  readonly versionSpans: readonly VersionSpan[];
}

/**
 * Yields the events of a Sample call, each exactly once. After a lost connection, the call continues after the tokens
 * that were delivered, at the same version. Requests for a checkpoint, with structured output, or for log-probabilities
 * or a probe of the prompt cannot be continued, and no request after more than 4096 delivered tokens.
 *
 * @throws TwinkleError; a repeatable one only if no response arrived for the retry time, or the request cannot be
 * continued.
 */
export async function* continuedSample(
  sampler: Client<typeof SamplerService>,
  init: SampleInit,
  options: CallOptions = {},
): AsyncGenerator<SampleResponse, void, undefined> {
  const progress = new Progress(create(SampleRequestSchema, init));
  for (;;) {
    let hasProgressed = false;
    try {
      for await (const response of sampler.sample(progress.nextRequest(), options)) {
        hasProgressed = true;
        if (progress.record(response)) {
          yield response;
        }
      }
      return;
    } catch (reason) {
      const error = errorFrom(reason);
      // Without a response, the call itself has already been repeated for the retry time.
      if (!hasProgressed || !error.isRepeatable || !progress.canContinue) {
        throw error;
      }
    }
  }
}

/** Returns the finished sequences of a prompt, in the order of their indices. */
export async function collected(events: AsyncIterable<SampleResponse>): Promise<Completion[]> {
  const found: { text: string; tokenIds: number[]; logprobs: number[]; end?: [StopReason, VersionSpan[]] }[] = [];
  for await (const { event } of events) {
    if (event.case !== 'delta' && event.case !== 'finished') {
      continue;
    }
    const sequence = (found[event.value.sequenceIndex] ??= { text: '', tokenIds: [], logprobs: [] });
    sequence.text += event.value.text;
    if (event.case === 'delta') {
      sequence.tokenIds.push(...elements(event.value.tokenIds));
      sequence.logprobs.push(...elements(event.value.logprobs));
    } else {
      sequence.end = [event.value.stopReason, event.value.versionSpans];
    }
  }
  return found.map(({ end: [stopReason, versionSpans] = [StopReason.UNSPECIFIED, []], ...rest }) => ({
    ...rest,
    stopReason,
    versionSpans,
  }));
}

/** The part of a response that was delivered, and the request for the rest. */
class Progress {
  readonly #request: SampleRequest;
  readonly #sequences: { tokenIds: number[]; isFinished: boolean }[];
  #prompt: PromptInfo | undefined;
  #version: bigint | undefined;
  #attempts = 0;

  constructor(request: SampleRequest) {
    this.#request = request;
    this.#sequences = Array.from({ length: request.params?.sampleCount ?? 1 }, () => ({
      tokenIds: [],
      isFinished: false,
    }));
  }

  /** Whether the rest can be requested: before the first token, or if the gateway continues such a request. */
  get canContinue(): boolean {
    if (this.#version === undefined) {
      return true;
    }
    const { adapter, params } = this.#request;
    const isRefused =
      adapter?.version.case === 'checkpointPath' ||
      params?.structuredOutput !== undefined ||
      params?.promptProbe !== undefined ||
      Boolean(params?.isPromptLogprobsReturned) ||
      Boolean(params?.promptTopLogprobCount);
    const deliveredCount = this.#sequences.reduce((count, { tokenIds }) => count + tokenIds.length, 0);
    return this.#prompt !== undefined && !isRefused && deliveredCount <= MAX_DELIVERED_TOKENS;
  }

  /** Records a response, and returns whether to deliver it: a request that starts again repeats its prompt. */
  record({ event }: SampleResponse): boolean {
    if (event.case === 'prompt') {
      const isNew = this.#prompt === undefined;
      this.#prompt ??= event.value;
      return isNew;
    }
    const sequence = event.case && this.#sequences[event.value.sequenceIndex];
    if (sequence && event.case === 'delta') {
      sequence.tokenIds.push(...elements(event.value.tokenIds));
      this.#version = event.value.version;
    } else if (sequence) {
      sequence.isFinished = true;
      this.#version ??= 0n;
    }
    return true;
  }

  nextRequest(): SampleRequest {
    const request = clone(SampleRequestSchema, this.#request);
    // The gateway may not have noticed yet that an earlier call was lost, so the next one has another id.
    request.requestId = this.#attempts === 0 && request.requestId ? request.requestId : newId('sm');
    this.#attempts += 1;
    if (this.#version === undefined || !this.#prompt?.tokenIds) {
      return request;
    }
    request.prompt = create(PromptSchema, { content: { case: 'tokenIds', value: this.#prompt.tokenIds } });
    if (request.adapter) {
      request.adapter.version = { case: 'exact', value: this.#version };
    }
    request.continued = this.#sequences.map(({ tokenIds, isFinished }, sequenceIndex) =>
      create(SequenceSoFarSchema, { sequenceIndex, tokenIds: int32Tensor(tokenIds), isFinished }),
    );
    return request;
  }
}
