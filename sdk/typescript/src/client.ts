import type { DescService, MessageInitShape } from '@bufbuild/protobuf';
import {
  type CallOptions,
  type Client,
  Code,
  createClient,
  type Interceptor,
  type Transport,
} from '@connectrpc/connect';
import { connect, environment } from '#platform';
import { type Retry, systemClock } from './backoff.js';
import { ServerError } from './errors.js';
import type { Adapter } from './gen/twinkle/api/model/v1/adapter_pb.js';
import { AdapterService, type CreateAdapterRequestSchema } from './gen/twinkle/api/model/v1/adapter_service_pb.js';
import { TrainingService } from './gen/twinkle/api/model/v1/training_service_pb.js';
import { type SampleResponse, SamplerService } from './gen/twinkle/api/sampler/v1/sampler_service_pb.js';
import { newId } from './ids.js';
import { collected, type Completion, continuedSample, type SampleInit } from './sampling.js';
import { AdapterHandle } from './training.js';
import { CallTransport } from './transport.js';

/** Enough time for a service to restart and restore its state. */
export const DEFAULT_RETRY_TIMEOUT_MS = 120_000;

export interface ClientOptions {
  /**
   * Node.js: address of the gateway's gRPC port, `host:port` or `<scheme>://host:port` with one of the schemes http,
   * https, grpc and grpcs. Defaults to TWINKLE_SERVER_URL. Browsers: URL of the gateway's HTTP port. Defaults to the
   * server of the page.
   */
  readonly address?: string;
  /** API key. Node.js: defaults to TWINKLE_API_KEY. Browsers: defaults to the session of the console. */
  readonly apiKey?: string;
  /**
   * Node.js: path of a PEM file of CA certificates that verify a server with TLS. Defaults to TWINKLE_CA, or else to the
   * certificates of Node.js.
   */
  readonly ca?: string;
  /** Deadline of one attempt of a unary call in milliseconds. Defaults to the deadline of the method. */
  readonly timeoutMs?: number;
  /** Time for which calls are repeated while the server is unavailable. 0: calls are sent once. Defaults to 2 minutes. */
  readonly retryTimeoutMs?: number;
  /** Called before a call waits for its next attempt, for example to log the outage. */
  readonly onRetry?: (retry: Retry) => void;
  /** Interceptors of Connect, which see every attempt. */
  readonly interceptors?: Interceptor[];
  /** Transport of Connect that replaces the connection to `address`, for example in tests. */
  readonly transport?: Transport;
}

/**
 * Client of a gateway. Methods throw `TwinkleError`. Node.js programs call `close` at their end, because an open
 * connection keeps the process running.
 */
export class TwinkleClient {
  readonly #transport: Transport;
  readonly #close: () => void;
  readonly #sampler: Client<typeof SamplerService>;
  readonly #training: Client<typeof TrainingService>;
  readonly #adapters: Client<typeof AdapterService>;

  /** @throws TypeError if there is no address, the address is malformed, or `ca` contains no certificate. */
  constructor(options: ClientOptions = {}) {
    const defaults = environment();
    const connection = options.transport
      ? { transport: options.transport, close: () => undefined }
      : connect({
          address: options.address ?? defaults.address,
          ca: options.ca ?? defaults.ca,
          interceptors: options.interceptors ?? [],
        });
    this.#close = connection.close;
    this.#transport = new CallTransport(connection.transport, {
      apiKey: options.apiKey ?? defaults.apiKey,
      timeoutMs: options.timeoutMs,
      retryTimeoutMs: options.retryTimeoutMs ?? DEFAULT_RETRY_TIMEOUT_MS,
      onRetry: options.onRetry ?? (() => undefined),
      clock: systemClock,
    });
    this.#sampler = this.service(SamplerService);
    this.#training = this.service(TrainingService);
    this.#adapters = this.service(AdapterService);
  }

  /**
   * Returns the typed methods of a service of the contracts, with deadlines, retries and errors of this client. Calls
   * with a stream of requests are sent once, and browsers have none.
   */
  service<S extends DescService>(service: S): Client<S> {
    return createClient(service, this.#transport);
  }

  /**
   * Streams the completions of a prompt; leaving the loop cancels the request. After a lost connection, the stream
   * continues after the tokens that were delivered, at the same version, so each event is delivered exactly once.
   */
  sample(request: SampleInit, options: CallOptions = {}): AsyncGenerator<SampleResponse, void, undefined> {
    return continuedSample(this.#sampler, request, options);
  }

  /** Returns the finished completions of a prompt, in the order of their indices. */
  async complete(request: SampleInit, options: CallOptions = {}): Promise<Completion[]> {
    return collected(this.sample(request, options));
  }

  /** Creates an adapter. A repeated request with the same `requestId`, which is chosen if it is empty, returns it. */
  async createAdapter(
    request: MessageInitShape<typeof CreateAdapterRequestSchema>,
    options: CallOptions = {},
  ): Promise<AdapterHandle> {
    const requestId = request.requestId || newId('rq');
    return this.#handle((await this.#adapters.createAdapter({ ...request, requestId }, options)).adapter);
  }

  /** Returns an existing adapter, to continue its training after its last operation. */
  async openAdapter(adapterId: string, options: CallOptions = {}): Promise<AdapterHandle> {
    return this.#handle((await this.#adapters.getAdapter({ adapterId }, options)).adapter);
  }

  /** Closes the connection and cancels running calls. */
  close(): void {
    this.#close();
  }

  #handle(adapter: Adapter | undefined): AdapterHandle {
    if (!adapter) {
      throw new ServerError({ code: Code.Internal, rawMessage: 'the response has no adapter' });
    }
    return new AdapterHandle(adapter, this.#training, this.#adapters);
  }
}
