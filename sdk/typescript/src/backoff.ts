// Waits between the attempts of a call.
import { errorFrom, type TwinkleError } from './errors.js';

const FIRST_DELAY_MS = 200;
const LAST_DELAY_MS = 5_000;
/**
 * Failed attempts that take longer than this, and longer than half of the retry time, begin a new outage. Shorter ones
 * may only have tried to connect.
 */
const WORK_MS = 10_000;
/** Reason of the error for a call that waits for work in progress, which may take longer than an outage is tolerated. */
const PROGRESS = 'POSITION_NOT_REACHED';

/** Time, which tests replace. */
export interface Clock {
  now(): number;
  /** Resolves after a time, or rejects as soon as `signal` is aborted. */
  sleep(milliseconds: number, signal: AbortSignal | undefined): Promise<void>;
}

export const systemClock: Clock = {
  now: () => performance.now(),
  sleep: (milliseconds, signal) =>
    new Promise((resolve, reject) => {
      signal?.throwIfAborted();
      const timer = setTimeout(() => {
        signal?.removeEventListener('abort', stop);
        resolve();
      }, milliseconds);
      const stop = (): void => {
        clearTimeout(timer);
        reject(signal?.reason instanceof Error ? signal.reason : new DOMException('aborted', 'AbortError'));
      };
      signal?.addEventListener('abort', stop, { once: true });
    }),
};

/** A failed attempt that will be repeated. */
export interface Retry {
  readonly error: TwinkleError;
  /** Time until the next attempt. */
  readonly delayMs: number;
}

export interface RetrySettings {
  /** Longest outage that is tolerated, counted from its first failure. 0 disables retries. */
  readonly retryTimeoutMs: number;
  readonly clock: Clock;
  readonly onRetry: (retry: Retry) => void;
}

/** Waits between attempts, longer each time, until an outage has lasted too long. */
export class Backoff {
  readonly #settings: RetrySettings;
  #end: number | undefined;
  #delay = FIRST_DELAY_MS;
  #resumed: number;

  constructor(settings: RetrySettings) {
    this.#settings = settings;
    this.#resumed = settings.clock.now();
  }

  /**
   * Waits before the next attempt, at least for the delay that the server requested.
   *
   * @throws `error`, if the request may not be repeated or the outage has lasted too long; CancelledError if `signal`
   * is aborted.
   */
  async waitOrThrow(error: TwinkleError, signal?: AbortSignal): Promise<void> {
    const { clock, retryTimeoutMs, onRetry } = this.#settings;
    const now = clock.now();
    // The server was available during a long attempt or works for this call, so the failure begins a new outage.
    const isWorking = error.reason === PROGRESS || now - this.#resumed > Math.max(retryTimeoutMs / 2, WORK_MS);
    if (this.#end === undefined || isWorking) {
      this.#end = now + retryTimeoutMs;
      this.#delay = FIRST_DELAY_MS;
    }
    if (!error.isRepeatable || now >= this.#end) {
      throw error;
    }
    const delayMs = Math.max(this.#delay, error.retryAfterMs ?? 0);
    this.#delay = Math.min(2 * this.#delay, LAST_DELAY_MS);
    onRetry({ error, delayMs });
    try {
      await clock.sleep(delayMs, signal);
    } catch (reason) {
      throw errorFrom(reason, { requestId: error.requestId, signal });
    }
    this.#resumed = clock.now();
  }
}
