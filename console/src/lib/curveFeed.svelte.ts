// Curves of runs that are followed live: over one stream for all runs or, after an error, by polling for some time.
import { untrack } from 'svelte';
import { type Curve, curveOf, insert } from './curves';
import { type Failure, failureOf, isAborted } from './failure';
import { CurveReader, MAX_POINTS } from './listing';
import type { Loading } from './query.svelte';
import { metrics } from './rpc';
import { visibility } from './visibility.svelte';

const POLL_MS = 2000;
const POLLS = 10;

export class CurveFeed implements Loading<Map<string, Curve[]>> {
  /** Curves by run. Undefined until the first curves have arrived. */
  data = $state.raw<Map<string, Curve[]>>();
  failure = $state.raw<Failure>();
  isLoading = $state(true);
  #reloads = $state(0);
  #tokens = new Map<string, string>();
  #readers = new Map<string, CurveReader>();

  /**
   * Starts following. Must be called while a component is initialized.
   *
   * @param runIds returns the runs. A change of the state that it reads restarts the stream.
   * @param isStreamed returns whether the page has a connection for the stream. Otherwise, the curves are polled.
   */
  constructor(runIds: () => string[], isStreamed = (): boolean => true) {
    $effect(() => {
      void this.#reloads;
      const [ids, hasStream] = [runIds(), isStreamed()];
      if (!visibility.isVisible || !ids.length) {
        return undefined;
      }
      const control = new AbortController();
      untrack(() => void this.#follow(ids, hasStream, control.signal));
      return () => control.abort();
    });
  }

  reload(): void {
    this.#reloads += 1;
  }

  async #follow(ids: string[], hasStream: boolean, signal: AbortSignal): Promise<void> {
    while (!signal.aborted) {
      if (hasStream) {
        // If the error persists, the polls fail too and show it.
        await this.#stream(ids, signal).catch(() => undefined);
      }
      for (let polls = 0; polls < POLLS && !signal.aborted; polls += 1) {
        await this.#poll(ids, signal);
        await new Promise((resume) => setTimeout(resume, POLL_MS));
      }
    }
  }

  /** Reads the stream until it fails. Begins after the last received message of each run. */
  async #stream(ids: string[], signal: AbortSignal): Promise<void> {
    const runs = ids.map((runId) => ({ runId, resumeToken: this.#tokens.get(runId) ?? '' }));
    for await (const update of metrics.watchMetrics({ runs, maxPoints: MAX_POINTS }, { signal })) {
      if (signal.aborted) {
        return;
      }
      const fresh = update.series.map(curveOf);
      this.#tokens.set(update.runId, update.resumeToken);
      this.#show(update.runId, update.isSnapshot ? fresh : insert(this.data?.get(update.runId) ?? [], fresh), signal);
    }
  }

  async #poll(ids: string[], signal: AbortSignal): Promise<void> {
    try {
      for (const id of ids) {
        const reader = this.#readers.get(id) ?? new CurveReader(id);
        this.#readers.set(id, reader);
        this.#show(id, await reader.read(signal), signal);
      }
    } catch (error) {
      if (!signal.aborted && !isAborted(error)) {
        this.failure = failureOf(error);
        this.isLoading = false;
      }
    }
  }

  #show(id: string, curves: Curve[], signal: AbortSignal): void {
    if (!signal.aborted) {
      this.data = new Map([...(this.data ?? []), [id, curves]]);
      this.failure = undefined;
      this.isLoading = false;
    }
  }
}

/** The curves of one run of a feed. */
export class RunCurves implements Loading<Curve[]> {
  readonly #feed: CurveFeed;

  constructor(
    readonly runId: string,
    isStreamed: () => boolean,
  ) {
    this.#feed = new CurveFeed(() => [runId], isStreamed);
  }

  get data(): Curve[] | undefined {
    return this.#feed.data?.get(this.runId);
  }

  get failure(): Failure | undefined {
    return this.#feed.failure;
  }

  get isLoading(): boolean {
    return this.#feed.isLoading;
  }

  reload(): void {
    this.#feed.reload();
  }
}
