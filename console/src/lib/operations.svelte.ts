// The newest results of a run's operations, followed live.
import { type Failure, failureOf, hasReason, isAborted } from './failure';
import { type OperationRow, rowOf } from './receipts';
import { training } from './rpc';

const KEPT = 500;
const RECONNECT_MS = 2000;
const FLUSH_MS = 100;

export class OperationLog {
  /** Ascending by number. */
  rows = $state.raw<OperationRow[]>([]);
  failure = $state.raw<Failure>();
  isConnected = $state(false);
  #pending: OperationRow[] = [];
  #timer: ReturnType<typeof setTimeout> | undefined;

  /** Follows the results until `signal` aborts. `lastNumber` is the number of the last executed operation. */
  async follow(runId: string, lastNumber: number, signal: AbortSignal): Promise<void> {
    this.#flush();
    let after = Math.max(0, lastNumber - KEPT);
    while (!signal.aborted) {
      try {
        await this.#read(runId, this.rows.at(-1)?.number ?? after, signal);
      } catch (error) {
        if (signal.aborted || isAborted(error)) {
          this.isConnected = false;
          return;
        }
        if (hasReason(error, 'OPERATION_NOT_FOUND') && after < lastNumber && !this.rows.length) {
          // Older results were deleted: try half of the distance to the newest one.
          after = lastNumber - Math.floor((lastNumber - after) / 2);
          continue;
        }
        this.failure = failureOf(error);
      }
      this.isConnected = false;
      this.#flush();
      await new Promise((resume) => setTimeout(resume, RECONNECT_MS));
    }
  }

  async #read(runId: string, after: number, signal: AbortSignal): Promise<void> {
    const request = { adapterId: runId, afterSequenceNumber: BigInt(after) };
    this.isConnected = true;
    for await (const { result } of training.watchOperations(request, { signal })) {
      this.failure = undefined;
      if (result) {
        this.#pending.push(rowOf(result));
        this.#timer ??= setTimeout(() => this.#flush(), FLUSH_MS);
      }
    }
  }

  /** Shows the results that have arrived. They are shown together, because recorded results arrive in a burst. */
  #flush(): void {
    this.rows = [...this.rows, ...this.#pending].slice(-KEPT);
    this.#pending = [];
    this.#timer = undefined;
  }
}
