// Adds to a transport what every call needs: a request id, the API key, the deadline of the method, retries, and errors
// of this package.
import type { DescMessage, DescMethodStreaming, DescMethodUnary, MessageInitShape } from '@bufbuild/protobuf';
import type { ContextValues, StreamResponse, Transport, UnaryResponse } from '@connectrpc/connect';
import { Backoff, type RetrySettings } from './backoff.js';
import { errorFrom } from './errors.js';
import { DEADLINES_MS } from './gen/deadlines.js';
import { newId } from './ids.js';

export interface CallSettings extends RetrySettings {
  /** Empty for a server without authentication, or a browser with a cookie. */
  readonly apiKey: string;
  /** Deadline of unary calls; undefined for the deadlines of the contracts. */
  readonly timeoutMs: number | undefined;
}

/**
 * Repeats unary calls, and calls with a stream of responses before the first one, as `TwinkleError.isRepeatable` says.
 * Calls with a stream of requests are sent once.
 */
export class CallTransport implements Transport {
  readonly #base: Transport;
  readonly #settings: CallSettings;

  constructor(base: Transport, settings: CallSettings) {
    this.#base = base;
    this.#settings = settings;
  }

  async unary<I extends DescMessage, O extends DescMessage>(
    method: DescMethodUnary<I, O>,
    signal: AbortSignal | undefined,
    timeoutMs: number | undefined,
    header: HeadersInit | undefined,
    input: MessageInitShape<I>,
    contextValues?: ContextValues,
  ): Promise<UnaryResponse<I, O>> {
    const limit = timeoutMs ?? this.#settings.timeoutMs ?? DEADLINES_MS[`${method.parent.typeName}/${method.name}`];
    return this.#repeated(header, signal, (headers) =>
      this.#base.unary(method, signal, limit, headers, input, contextValues),
    );
  }

  async stream<I extends DescMessage, O extends DescMessage>(
    method: DescMethodStreaming<I, O>,
    signal: AbortSignal | undefined,
    timeoutMs: number | undefined,
    header: HeadersInit | undefined,
    input: AsyncIterable<MessageInitShape<I>>,
    contextValues?: ContextValues,
  ): Promise<StreamResponse<I, O>> {
    const call = (headers: Headers, messages: AsyncIterable<MessageInitShape<I>>): Promise<StreamResponse<I, O>> =>
      this.#base.stream(method, signal, timeoutMs, headers, messages, contextValues);
    if (method.methodKind !== 'server_streaming') {
      const headers = this.#headers(header);
      const context = { requestId: headers.get('x-request-id') ?? '', signal };
      const response = await call(headers, input).catch((reason: unknown) => {
        throw errorFrom(reason, context);
      });
      return { ...response, message: withErrors(response.message[Symbol.asyncIterator](), undefined, context) };
    }
    const request = await only(input);
    return this.#repeated(header, signal, async (headers) => {
      const response = await call(headers, once(request));
      const messages = response.message[Symbol.asyncIterator]();
      const first = await messages.next();
      const context = { requestId: headers.get('x-request-id') ?? '', signal };
      return { ...response, message: withErrors(messages, first, context) };
    });
  }

  #headers(header: HeadersInit | undefined): Headers {
    const headers = new Headers(header);
    if (!headers.has('x-request-id')) {
      headers.set('x-request-id', newId('rq'));
    }
    if (this.#settings.apiKey && !headers.has('authorization')) {
      headers.set('authorization', `Bearer ${this.#settings.apiKey}`);
    }
    return headers;
  }

  async #repeated<T>(
    header: HeadersInit | undefined,
    signal: AbortSignal | undefined,
    attempt: (headers: Headers) => Promise<T>,
  ): Promise<T> {
    const headers = this.#headers(header);
    const backoff = new Backoff(this.#settings);
    for (;;) {
      try {
        // The transport adds its own headers to the ones that it receives.
        return await attempt(new Headers(headers));
      } catch (reason) {
        const requestId = headers.get('x-request-id') ?? '';
        await backoff.waitOrThrow(errorFrom(reason, { requestId, signal }), signal);
      }
    }
  }
}

async function* once<T>(item: T): AsyncGenerator<T> {
  yield item;
}

async function only<T>(items: AsyncIterable<T>): Promise<T> {
  for await (const item of items) {
    return item;
  }
  throw new TypeError('the call has no request message');
}

/** Yields `first` and the rest of the messages, and converts their errors. Leaving the loop ends the call. */
async function* withErrors<T>(
  messages: AsyncIterator<T>,
  first: IteratorResult<T> | undefined,
  context: { requestId: string; signal: AbortSignal | undefined },
): AsyncGenerator<T> {
  let isEnded = false;
  try {
    let item = first ?? (await messages.next());
    while (!item.done) {
      yield item.value;
      item = await messages.next();
    }
    isEnded = true;
  } catch (reason) {
    isEnded = true;
    throw errorFrom(reason, context);
  } finally {
    if (!isEnded) {
      await messages.return?.();
    }
  }
}
