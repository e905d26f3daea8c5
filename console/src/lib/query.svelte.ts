// Data that a component loads, reloads when its inputs change, and polls.
import { type Failure, failureOf, isAborted } from './failure';
import { untilVisible } from './visibility.svelte';

/** A value that is read from the server, and the state of reading it. */
export interface Loading<T> {
  /** Undefined until the value has been read once. */
  readonly data: T | undefined;
  readonly failure: Failure | undefined;
  readonly isLoading: boolean;
  reload(): void;
}

export class Query<T> implements Loading<T> {
  data = $state.raw<T>();
  failure = $state.raw<Failure>();
  isLoading = $state(true);
  #reloads = $state(0);

  /**
   * Starts loading. Must be called while a component is initialized.
   *
   * @param load reads the data. State that `load` reads before its first `await` is an input: a change reloads the data.
   * @param interval time between the end of a load and the next one, in milliseconds. 0 loads once.
   */
  constructor(load: (signal: AbortSignal) => Promise<T>, interval = 0) {
    $effect(() => {
      void this.#reloads;
      const control = new AbortController();
      let timer: ReturnType<typeof setTimeout> | undefined;
      const run = async (): Promise<void> => {
        await this.#run(load, control.signal);
        await untilVisible();
        if (interval && !control.signal.aborted) {
          timer = setTimeout(() => void run(), interval);
        }
      };
      void run();
      return () => {
        control.abort();
        clearTimeout(timer);
      };
    });
  }

  reload(): void {
    this.#reloads += 1;
  }

  async #run(load: (signal: AbortSignal) => Promise<T>, signal: AbortSignal): Promise<void> {
    this.isLoading = true;
    try {
      const data = await load(signal);
      if (!signal.aborted) {
        this.data = data;
        this.failure = undefined;
      }
    } catch (error) {
      if (!signal.aborted && !isAborted(error)) {
        this.failure = failureOf(error);
      }
    } finally {
      if (!signal.aborted) {
        this.isLoading = false;
      }
    }
  }
}

/** A change that the user requests, with its error. */
export class Action {
  failure = $state.raw<Failure>();
  isRunning = $state(false);

  /** Runs `change`, and returns whether it succeeded. */
  async run(change: () => Promise<unknown>): Promise<boolean> {
    this.isRunning = true;
    this.failure = undefined;
    try {
      await change();
      return true;
    } catch (error) {
      this.failure = failureOf(error);
      return false;
    } finally {
      this.isRunning = false;
    }
  }
}
