// A completion that is being streamed, token by token.
import type { MessageInitShape } from '@bufbuild/protobuf';
import type { SampleRequestSchema } from 'twinkle-grpc/api/sampler/v1/sampler_service_pb';
import { StopReason, type TokenDelta } from 'twinkle-grpc/api/sampler/v1/sampling_pb';
import { type Failure, failureOf, isAborted } from './failure';
import { lower } from './format';
import { client } from './rpc';
import { elements } from 'twinkle-grpc';
import { TokenDecoder, type Vocabulary, vocabularyOf } from './vocabulary';

export interface Token {
  id: number;
  text: string;
  isSpecial: boolean;
  /** Natural log-probability before temperature and filters. */
  logprob: number;
  /** Version that sampled the token. 0 is the base model. */
  version: number;
  /** The most likely tokens at this position, most likely first. */
  top: { id: number; logprob: number }[];
}

export class Generation {
  tokens = $state.raw<Token[]>([]);
  failure = $state.raw<Failure>();
  isRunning = $state(false);
  stopReason = $state('');
  promptTokenCount = $state(0);
  cachedTokenCount = $state(0);
  firstTokenMs = $state<number>();
  tokensPerSecond = $state<number>();
  #control = new AbortController();
  #begin = 0;
  #tokenCount = 0;

  async run(request: MessageInitShape<typeof SampleRequestSchema>): Promise<void> {
    this.stop();
    this.#reset();
    const { signal } = this.#control;
    const vocabulary = vocabularyOf(request.baseModel ?? '');
    const decoder = new TokenDecoder(vocabulary);
    // Token texts are read concurrently with the stream, so that the stream is not delayed.
    let added = Promise.resolve();
    try {
      for await (const { event } of client.sample(request, { signal })) {
        if (event.case === 'prompt') {
          this.promptTokenCount = elements(event.value.tokenIds).length;
          this.cachedTokenCount = event.value.cachedTokenCount;
        } else if (event.case === 'delta') {
          const delta = event.value;
          this.#time(delta);
          added = added.then(() => this.#add(delta, vocabulary, decoder, signal));
        } else if (event.case === 'finished') {
          this.stopReason = lower(StopReason[event.value.stopReason]);
        }
      }
      await added;
    } catch (error) {
      if (isAborted(error)) {
        this.stopReason = 'stopped';
      } else {
        this.failure = failureOf(error);
      }
    } finally {
      if (this.#control.signal === signal) {
        this.isRunning = false;
      }
    }
  }

  stop(): void {
    this.#control.abort();
  }

  #reset(): void {
    this.#control = new AbortController();
    this.#begin = performance.now();
    this.#tokenCount = 0;
    this.tokens = [];
    this.failure = undefined;
    this.isRunning = true;
    this.stopReason = '';
    this.promptTokenCount = this.cachedTokenCount = 0;
    this.firstTokenMs = this.tokensPerSecond = undefined;
  }

  #time({ tokenIds }: TokenDelta): void {
    const elapsed = performance.now() - this.#begin;
    this.#tokenCount += elements(tokenIds).length;
    this.firstTokenMs ??= elapsed;
    if (elapsed > this.firstTokenMs) {
      this.tokensPerSecond = (1000 * (this.#tokenCount - 1)) / (elapsed - this.firstTokenMs);
    }
  }

  async #add(delta: TokenDelta, vocabulary: Vocabulary, decoder: TokenDecoder, signal: AbortSignal): Promise<void> {
    const ids = elements(delta.tokenIds);
    const logprobs = elements(delta.logprobs);
    await vocabulary.load(ids, signal);
    const topIds = elements(delta.topLogprobs?.tokenIds);
    const topLogprobs = elements(delta.topLogprobs?.logprobs);
    const width = topIds.length / (ids.length || 1);
    const tokens = ids.map((id, index) => ({
      id,
      ...decoder.next(id),
      logprob: logprobs[index] ?? NaN,
      version: Number(delta.version),
      top: topIds
        .slice(index * width, (index + 1) * width)
        .map((other, place) => ({ id: other, logprob: topLogprobs[index * width + place] ?? NaN })),
    }));
    this.tokens = [...this.tokens, ...tokens];
  }
}
